// SPDX-License-Identifier: Apache-2.0
//! Loosens rp_filter while there are peers of another backend type.
//!
//! The former values are in a file beside subnet.env. They are restored when the last such peer is gone, also by a later run of the agent. The
//! file is valid for one boot, because a boot sets all sysctls again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use nix::net::if_::if_nametoindex;
use weft_backends::state::Name;

use super::set;
use crate::files;
use crate::kernel::sysctl;
use crate::observe::problem::{Problem, ProblemKind};

/// The loose mode: a packet is accepted if its source is reachable over any interface (RFC 3704 section 2.4).
const LOOSE: &str = "2";
/// The strict mode: a packet is accepted if its source is reachable over the interface on which it arrived (RFC 3704 section 2.2).
const STRICT: &str = "1";

/// Which filters are to be loosened, and why.
#[derive(Debug)]
pub struct Wanted {
    /// The interfaces on which packets of peers arrive.
    pub names: Vec<Name>,
    /// Why this is necessary, for people.
    pub why: String,
}

/// The filter of an interface before weft loosened it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    /// Index of the interface. An interface that was created again has another index and its own filter.
    index: u32,
    value: String,
}

/// The filters that are loosened now.
#[derive(Debug)]
pub struct Loosened {
    file: PathBuf,
    found: BTreeMap<Name, Found>,
    read: bool,
    /// Why the file cannot be used. It stays as it is until the operator removes it.
    damaged: Option<String>,
    /// Why the file could not be written.
    unsaved: Option<String>,
}

impl Loosened {
    /// Returns a value that uses the file beside this subnet file.
    pub fn new(subnet_file: &Path) -> Loosened {
        let file = subnet_file.with_added_extension("rp_filter");
        Loosened { file, found: BTreeMap::new(), read: false, damaged: None, unsaved: None }
    }

    /// Loosens the wanted filters that are strict, and restores the others. If `write` is false, it only checks. Returns what the operator
    /// should know or do.
    pub fn ensure(&mut self, wanted: Option<&Wanted>, write: bool) -> Vec<Problem> {
        self.read_file();
        let names: &[Name] = wanted.map_or(&[], |wanted| &wanted.names);
        let before = self.found.clone();
        let strict: Vec<Name> = names.iter().copied().filter(|name| is_strict(*name)).collect();
        if write {
            // The record is written before anything is changed, so that it is right after a crash.
            strict.iter().for_each(|name| self.remember(*name));
            self.save(&before);
        }
        let mut problems: Vec<Problem> = strict.iter().filter_map(|name| set(&path(*name), LOOSE, write)).collect();
        let before = self.found.clone();
        self.found.retain(|name, found| names.contains(name) || !restore(*name, found, write, &mut problems));
        self.save(&before);
        let remark = wanted.and_then(|wanted| self.remark(wanted));
        let unsaved = self.unsaved.clone().filter(|_| !self.found.is_empty());
        let texts = [remark, self.damaged.clone(), unsaved];
        problems.extend(Problem::each(ProblemKind::Sysctl, texts.into_iter().flatten()));
        problems
    }

    fn remember(&mut self, name: Name) {
        let (Ok(index), Ok(value)) = (if_nametoindex(name.as_bytes()), sysctl::read(path(name))) else { return };
        // Another program may make the filter strict again while it is loosened. The first value stays in the record.
        if self.found.get(&name).is_none_or(|found| found.index != index) {
            self.found.insert(name, Found { index, value });
        }
    }

    fn remark(&self, wanted: &Wanted) -> Option<String> {
        if self.found.is_empty() {
            return None;
        }
        let was: Vec<String> = self.found.iter().map(|(name, found)| format!("{name} {}", found.value)).collect();
        Some(format!(
            "rp_filter is loosened to {LOOSE} while {}; afterwards the agent sets it back: {}",
            wanted.why,
            was.join(", ")
        ))
    }

    /// Reads the file once. While it is damaged, it is read again each time.
    fn read_file(&mut self) {
        if self.read && self.damaged.is_none() {
            return;
        }
        self.read = true;
        let file = self.file.display();
        self.damaged = match files::read_parsed(&self.file, |text| parse(text, &boot())) {
            Ok(found) => {
                for (name, one) in found {
                    self.found.entry(name).or_insert(one);
                }
                None
            }
            Err(why) => Some(format!(
                "{file}: {why}: the agent does not know where an earlier run loosened rp_filter from {STRICT} to {LOOSE}; \
                 look at `sysctl -ar rp_filter`, set it to {STRICT} where it should be strict, then remove {file}"
            )),
        };
    }

    fn save(&mut self, before: &BTreeMap<Name, Found>) {
        if self.damaged.is_some() || (*before == self.found && self.unsaved.is_none()) {
            return;
        }
        let done = if self.found.is_empty() {
            files::remove(&self.file)
        } else {
            files::replace(&self.file, &text(&self.found, &boot()), 0o644)
        };
        let file = self.file.display();
        self.unsaved = done.err().map(|error| {
            format!("write {file}: {error}: after a restart the agent will not know the former value of rp_filter, and it will stay {LOOSE}")
        });
    }
}

/// Returns the contents of the file: a line for the boot, and a line for each interface with its index, value and name.
fn text(found: &BTreeMap<Name, Found>, boot: &str) -> Vec<u8> {
    let mut text = format!("boot {boot}\n").into_bytes();
    for (name, Found { index, value }) in found {
        text.extend_from_slice(format!("{index} {value} ").as_bytes());
        text.extend_from_slice(name.as_bytes());
        text.push(b'\n');
    }
    text
}

/// Parses the file. Returns `None` if it is damaged. A file of another boot contains nothing that is valid now.
fn parse(text: &[u8], boot: &str) -> Option<BTreeMap<Name, Found>> {
    let mut lines = text.strip_suffix(b"\n")?.split(|b| *b == b'\n');
    let then = lines.next()?.strip_prefix(b"boot ")?;
    let line = |line: &[u8]| {
        let mut words = line.splitn(3, |b| *b == b' ');
        let mut word = || std::str::from_utf8(words.next()?).ok();
        let (index, value) = (word()?.parse().ok()?, word()?.to_owned());
        // The kernel accepts only these values. A value from the file is written to the kernel later.
        let known = ["0", STRICT, LOOSE].contains(&value.as_str());
        Some((Name::of_kernel(words.next()?)?, Found { index, value })).filter(|_| known)
    };
    let found = lines.map(line).collect::<Option<_>>()?;
    Some(if then == boot.as_bytes() { found } else { BTreeMap::new() })
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn path(name: Name) -> PathBuf {
    sysctl::of_interface("ipv4", name, "rp_filter")
}

/// Returns true if the filter of this interface is strict. There is none if the interface does not exist.
fn is_strict(name: Name) -> bool {
    let all = Name::new("all").and_then(|all| sysctl::read(path(all)).ok()).unwrap_or_default();
    sysctl::read(path(name)).is_ok_and(|own| is_strict_with(&all, &own))
}

/// Returns true if these values for all interfaces and for one make the filter of that one strict. The kernel uses the larger one of them
/// (`rp_filter` of Documentation/networking/ip-sysctl.rst).
fn is_strict_with(all: &str, own: &str) -> bool {
    [all, own].contains(&STRICT) && ![all, own].contains(&LOOSE)
}

/// Restores a filter. Returns true if that is done, or if it is not necessary, because the interface is another one or because another program
/// has set a value since.
fn restore(name: Name, found: &Found, write: bool, problems: &mut Vec<Problem>) -> bool {
    let same = if_nametoindex(name.as_bytes()).is_ok_and(|index| index == found.index);
    if !same || sysctl::read(path(name)).is_ok_and(|now| now != LOOSE) {
        return true;
    }
    let problem = set(&path(name), &found.value, write);
    problems.extend(problem.clone());
    problem.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::with_fifo;

    #[test]
    fn a_file_that_is_not_regular_is_a_problem_and_holds_nothing_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut loosened = Loosened::new(&dir.path().join("subnet.env"));
        let file = loosened.file.clone();
        let problems = with_fifo(&file, move || loosened.ensure(None, true));
        assert!(problems[0].text.contains(".rp_filter: it is not a regular file"), "{problems:?}");
    }

    #[test]
    fn a_filter_is_strict_if_the_larger_one_of_two_values_is() {
        let strict = [("0", "1"), ("1", "0"), ("1", "1"), ("", "1")];
        for all in ["", "0", "1", "2"] {
            for own in ["0", "1", "2"] {
                assert_eq!(is_strict_with(all, own), strict.contains(&(all, own)), "all {all:?}, own {own}");
            }
        }
    }

    #[test]
    fn the_file_is_valid_for_one_boot() {
        let found = |index, value: &str| Found { index, value: value.to_owned() };
        let name = |bytes: &[u8]| Name::of_kernel(bytes).unwrap();
        let all = BTreeMap::from([(name(b"eth0"), found(2, "1")), (name(b"od\xff"), found(70, "0"))]);
        let text = text(&all, "b1");
        assert_eq!(parse(&text, "b1"), Some(all));
        assert_eq!(parse(&text, "b2"), Some(BTreeMap::new()));
        for damaged in ["", "boot b1", "2 1 eth0\n", "boot b1\n2 1\n", "boot b1\nx 1 eth0\n", "boot b1\n2 9 eth0\n"] {
            assert_eq!(parse(damaged.as_bytes(), "b1"), None, "{damaged:?}");
        }
    }
}
