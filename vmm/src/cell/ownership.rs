//! Who owns each CPU and each page.
