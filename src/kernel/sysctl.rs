// SPDX-License-Identifier: Apache-2.0
//! Kernel parameters (sysctls). They are read first, and written only if the value differs. A read-only /proc with the right values
//! is therefore no error.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use weft_backends::state::Name;
use weft_subnet::outside::is_simulated;

/// What [`ensure`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It wrote the value.
    Changed,
    /// The parameter already had this value.
    Same,
}

/// The parameter has another value, and a person must set it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sysctl {name}: {cause}; run: {command}")]
pub struct NeedsHelp {
    /// The path of the parameter below /proc/sys.
    pub name: String,
    /// Why the agent did not set it.
    pub cause: String,
    /// The command that sets it.
    pub command: String,
}

/// Returns the path of a parameter of one interface below /proc/sys, such as `net/ipv4/conf/eth0/rp_filter`. `family` is `ipv4` or
/// `ipv6`.
pub fn of_interface(family: &str, name: Name, leaf: &str) -> PathBuf {
    Path::new("net").join(family).join("conf").join(OsStr::from_bytes(name.as_bytes())).join(leaf)
}

/// Returns the interfaces that have parameters of this family, `ipv4` or `ipv6`. `all` and `default` are among them, although they are no
/// interfaces. There are none if the kernel does not support the family.
pub fn interfaces(family: &str) -> Vec<Name> {
    if is_simulated() {
        return Vec::new();
    }
    let entries = fs::read_dir(Path::new("/proc/sys/net").join(family).join("conf"));
    entries.into_iter().flatten().flatten().filter_map(|entry| Name::of_kernel(entry.file_name().as_bytes())).collect()
}

/// Reads a parameter (a path below /proc/sys) in the network namespace of the calling thread.
///
/// # Errors
/// The parameter does not exist, or it cannot be read.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(fs::read_to_string(Path::new("/proc/sys").join(path))?.trim().to_owned())
}

/// Sets a parameter (a path below /proc/sys, such as `net/ipv4/ip_forward`) to this value, in the network namespace of the calling
/// thread. If `write` is false, it only compares.
///
/// # Errors
/// The value differs, and it may not or cannot be written. The error has the command that would write it.
pub fn ensure(path: impl AsRef<Path>, value: &str, write: bool) -> Result<Change, NeedsHelp> {
    let path = path.as_ref();
    if is_simulated() {
        return Ok(Change::Same);
    }
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

/// Returns the path for messages. The name of an interface in it need not be UTF-8.
pub fn shown(path: &Path) -> String {
    path.as_os_str().as_bytes().escape_ascii().to_string()
}

/// Returns the command that sets the parameter. It has a path, because in the form with dots, sysctl takes a dot in the name of an
/// interface for a separator. A name that means something else to a shell is quoted.
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
    fn a_right_value_is_not_written_and_a_wrong_value_is_reported() {
        let now = fs::read_to_string("/proc/sys/kernel/ostype").unwrap();
        // Nobody can write this parameter, so this succeeds only without writing.
        assert_eq!(ensure("kernel/ostype", now.trim(), true), Ok(Change::Same));
        let help = ensure("kernel/ostype", "Hurd", true).unwrap_err();
        assert_eq!(help.command, "sysctl -w kernel/ostype=Hurd");
        let help = ensure("kernel/ostype", "Hurd", false).unwrap_err();
        assert_eq!(help.cause, format!("it is {}", now.trim()));
        assert!(ensure("net/no/such", "1", true).is_err());
    }

    #[test]
    fn commands_can_be_pasted_into_a_shell_whatever_the_name_of_the_interface_is() {
        let of = |name: &[u8]| command(&of_interface("ipv4", Name::of_kernel(name).unwrap(), "rp_filter"), "2");
        assert_eq!(of(b"eth0.7"), "sysctl -w net/ipv4/conf/eth0.7/rp_filter=2");
        assert_eq!(of(b"e\xff;id'"), r"sysctl -w $'net/ipv4/conf/e\xff;id\'/rp_filter=2'");
    }
}
