//! Which CPUs a cell wants, and which of them it gets.

/// Which CPUs a cell wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpuChoice {
    /// These, in this order.
    Numbers(Vec<u32>),
    /// So many, from the highest down.
    Count(u32),
}

/// There are fewer CPUs to choose from than a cell wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooFew {
    /// How many it wants.
    pub wanted: u32,
    /// How many there are.
    pub open: usize,
}

impl CpuChoice {
    /// The numbers of the CPUs that the cell gets: a count is filled from those in `open`. Whether
    /// the numbers that a file names can be had is not looked at.
    ///
    /// # Errors
    /// When `open` has too few for the count.
    pub fn resolve(&self, open: impl IntoIterator<Item = u32>) -> Result<Vec<u32>, TooFew> {
        match self {
            Self::Numbers(numbers) => Ok(numbers.clone()),
            Self::Count(count) => {
                let mut open: Vec<u32> = open.into_iter().collect();
                open.sort_unstable();
                let first = usize::try_from(*count).ok().and_then(|count| open.len().checked_sub(count));
                first.map(|first| open.split_off(first)).ok_or(TooFew { wanted: *count, open: open.len() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_taken_from_the_highest_down() {
        assert_eq!(CpuChoice::Count(2).resolve([4, 1, 3]), Ok(vec![3, 4]));
        assert_eq!(CpuChoice::Count(3).resolve([4, 1, 3]), Ok(vec![1, 3, 4]));
        assert_eq!(CpuChoice::Count(4).resolve([4, 1, 3]), Err(TooFew { wanted: 4, open: 3 }));
        assert_eq!(CpuChoice::Numbers(vec![2, 9, 1]).resolve([4]), Ok(vec![2, 9, 1]));
    }
}
