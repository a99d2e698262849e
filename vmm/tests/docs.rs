//! The book's tables are those of the code.
//!
//! A chapter keeps such a table between two comments, `<!-- begin NAME: … -->` and
//! `<!-- end NAME -->`. With `BLESS=1` in the environment the tables are written anew.

use bulkhead_abi::message::{CellState, CpuUse, ErrorCode};
use bulkhead_vmm::cell::lifecycle::life_cycle_markdown;
use bulkhead_vmm::x86::cpuid::Table;
use bulkhead_vmm::x86::exit::exit_table_markdown;
use bulkhead_vmm::x86::msr::msr_table_markdown;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

fn chapter(file: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/reference").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (path, text)
}

/// Where the table `name` is in `text`.
fn place(text: &str, name: &str) -> Range<usize> {
    let begin = text.find(&format!("<!-- begin {name}: ")).expect("the table's first comment");
    let begin = begin + text[begin..].find("-->\n").expect("the comment's end") + "-->\n".len();
    let end = text[begin..].find(&format!("<!-- end {name} -->")).expect("the table's last comment");
    begin..begin + end
}

/// Compares the table `name` in the chapter `file` with `table`.
fn check(file: &str, name: &str, table: &str) {
    let (path, mut text) = chapter(file);
    let place = place(&text, name);
    // Without these blank lines a renderer may take the comment for a part of the table.
    let table = format!("\n{}\n\n", table.trim());
    if text[place.clone()] == table {
        return;
    }
    if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
        text.replace_range(place, &table);
        fs::write(&path, text).unwrap();
        return;
    }
    let difference = text[place].lines().zip(table.lines()).find(|(book, code)| book != code);
    panic!(
        "table {name} in {} is not the code's; BLESS=1 cargo test -p bulkhead-vmm --test docs writes it\n\
         first line that differs (book, code): {difference:#?}",
        path.display()
    );
}

#[test]
fn exits() {
    check("exits.md", "exits", &exit_table_markdown());
}

#[test]
fn life_cycle() {
    check("lifecycle.md", "lifecycle", &life_cycle_markdown());
}

#[test]
fn msrs() {
    check("msrs.md", "msrs", &msr_table_markdown());
}

#[test]
fn cpuid_leaves() {
    check("cpuid.md", "cpuid", &Table.to_string());
}

/// The values of an open enum that have names, as lines of a table.
fn codes(numbers: Range<u16>, name: impl Fn(u16) -> String) -> String {
    let known = numbers.map(|n| (n, name(n))).filter(|(n, name)| !name.ends_with(&format!("-{n}")));
    let lines: Vec<_> = known.map(|(n, name)| format!("| {n} | `{name}` |\n")).collect();
    assert!(!lines.is_empty());
    "| code | name |\n| --- | --- |\n".to_owned() + &lines.concat()
}

#[test]
fn codes_of_messages() {
    let byte = |n: u16| u8::try_from(n).unwrap();
    check("abi.md", "errors", &codes(0..1000, |n| ErrorCode(n).to_string()));
    check("abi.md", "states", &codes(0..256, |n| CellState(byte(n)).to_string()));
    check("abi.md", "uses", &codes(0..256, |n| CpuUse(byte(n)).to_string()));
}
