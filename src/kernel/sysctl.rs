// SPDX-License-Identifier: Apache-2.0
//! Kernel parameters: read before written, so that a read-only /proc with the right values is no obstacle.

use std::fs;

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

/// Gives a parameter (`net/ipv4/ip_forward`, a path below /proc/sys) this value; with `write` false only looks.
/// Acts on the network namespace of the calling thread.
///
/// # Errors
/// The value differs and may not, or cannot, be written: with the command that would do it.
pub fn ensure(path: &str, value: &str, write: bool) -> Result<Change, NeedsHelp> {
    let file = format!("/proc/sys/{path}");
    let help = |cause: String| NeedsHelp {
        name: path.to_owned(),
        cause,
        // The path form: an interface name may contain a dot, which the dotted form takes for a separator.
        command: format!("sysctl -w {path}={value}"),
    };
    let present = fs::read_to_string(&file).map_err(|e| help(e.to_string()))?;
    if present.split_whitespace().eq(value.split_whitespace()) {
        return Ok(Change::Same);
    }
    if !write {
        return Err(help(format!("it is {}", present.trim())));
    }
    fs::write(&file, value).map_err(|e| help(e.to_string()))?;
    Ok(Change::Changed)
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
}
