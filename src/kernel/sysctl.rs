// SPDX-License-Identifier: Apache-2.0
//! Kernel parameters: read before written, so that a read-only /proc with the right values is no obstacle.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use weft_backends::state::Name;

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Written.
    Changed,
    /// It had the value already.
    Same,
}

/// The value is wrong, and a person must set it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("set {name}: {cause}; run: {command}")]
pub struct NeedsHelp {
    /// Its path below /proc/sys.
    pub name: String,
    /// Why we did not, or could not.
    pub cause: String,
    /// What to type.
    pub command: String,
}

/// The parameter of one interface, below /proc/sys: `net/ipv4/conf/eth0/rp_filter`. `family` is `ipv4` or `ipv6`.
pub fn of_interface(family: &str, name: Name, leaf: &str) -> PathBuf {
    Path::new("net").join(family).join("conf").join(OsStr::from_bytes(name.as_bytes())).join(leaf)
}

/// What a parameter (a path below /proc/sys) says now, in the network namespace of the calling thread.
///
/// # Errors
/// There is no such parameter, or it cannot be read.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(fs::read_to_string(Path::new("/proc/sys").join(path))?.trim().to_owned())
}

/// Gives a parameter (`net/ipv4/ip_forward`, a path below /proc/sys) this value; with `write` false only looks.
/// Acts on the network namespace of the calling thread.
///
/// # Errors
/// The value differs and may not, or cannot, be written: with the command that would do it.
pub fn ensure(path: impl AsRef<Path>, value: &str, write: bool) -> Result<Change, NeedsHelp> {
    let path = path.as_ref();
    let help = |cause: String| NeedsHelp { name: shown(path), cause, command: command(path, value) };
    let present = read(path).map_err(|e| help(e.to_string()))?;
    if present.split_whitespace().eq(value.split_whitespace()) {
        return Ok(Change::Same);
    }
    if !write {
        return Err(help(format!("it is {present}")));
    }
    fs::write(Path::new("/proc/sys").join(path), value).map_err(|e| help(e.to_string()))?;
    Ok(Change::Changed)
}

/// The path for people; the name of an interface in it need not be text.
pub fn shown(path: &Path) -> String {
    path.as_os_str().as_bytes().escape_ascii().to_string()
}

/// What a person types. The path form, because the dotted form takes a dot in an interface's name for a separator. A name that a
/// shell would read as something else is quoted.
fn command(path: &Path, value: &str) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"/._-@".contains(b);
    let quoted = if path.as_os_str().as_bytes().iter().all(plain) { "" } else { "'" };
    let dollar = if quoted.is_empty() { "" } else { "$" };
    format!("sysctl -w {dollar}{quoted}{}={value}{quoted}", shown(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_value_is_not_written_and_a_wrong_one_is_named() {
        let now = fs::read_to_string("/proc/sys/kernel/ostype").unwrap();
        // Not writable by anyone: only reading can succeed.
        assert_eq!(ensure("kernel/ostype", now.trim(), true), Ok(Change::Same));
        let help = ensure("kernel/ostype", "Hurd", true).unwrap_err();
        assert_eq!(help.command, "sysctl -w kernel/ostype=Hurd");
        let help = ensure("kernel/ostype", "Hurd", false).unwrap_err();
        assert_eq!(help.cause, format!("it is {}", now.trim()));
        assert!(ensure("net/no/such", "1", true).is_err());
    }

    #[test]
    fn commands_can_be_pasted_whatever_the_interface_is_called() {
        let of = |name: &[u8]| command(&of_interface("ipv4", Name::of_kernel(name).unwrap(), "rp_filter"), "2");
        assert_eq!(of(b"eth0.7"), "sysctl -w net/ipv4/conf/eth0.7/rp_filter=2");
        assert_eq!(of(b"e\xff;id'"), r"sysctl -w $'net/ipv4/conf/e\xff;id\'/rp_filter=2'");
    }
}
