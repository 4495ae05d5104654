// SPDX-License-Identifier: Apache-2.0
//! The programs of iptables: which of them are installed, and how they are run. Nothing here blocks the thread of the caller.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use nix::unistd::{AccessFlags, access};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
pub use weft_cni::iptables::Flavour;
use weft_cni::iptables::{Saved, legacy_tables_file};
use weft_subnet::cidr::Family;

use crate::firewall::error::ProgramError;
use crate::firewall::nft::tables::{TableName, tables};

/// The time limit for one program. For up to [`LOCK`] of this time it may wait for another writer.
const LIMIT: Duration = Duration::from_secs(15);
/// How long a program waits for the lock of iptables, in seconds (`-w`).
const LOCK: &str = "5";

/// Returns the flavours whose programs are in PATH: those with a flavour in their name, else the plain one. Whether a program works is
/// found out when it runs.
pub fn installed() -> Vec<Flavour> {
    let mut found = Vec::new();
    for flavour in Flavour::ALL {
        // Where one of the others is installed, the plain program is a link to it.
        if flavour == Flavour::Plain && !found.is_empty() {
            break;
        }
        if is_in_path(&program(flavour, Family::V4, "restore")) {
            found.push(flavour);
        }
    }
    found
}

fn program(flavour: Flavour, family: Family, end: &str) -> String {
    format!("{}-{end}", flavour.program(family))
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).any(|dir| access(&dir.join(program), AccessFlags::X_OK).is_ok())
}

/// Reads the rules of one flavour and family. No program is run when the kernel has no table of it.
///
/// # Errors
/// The program is missing, failed, or did not end in time.
pub async fn save(flavour: Flavour, family: Family) -> Result<Saved, ProgramError> {
    // iptables-legacy has no tables in nftables.
    let nftables = if flavour == Flavour::Legacy { None } else { tables().await.ok() };
    save_among(flavour, family, nftables.as_deref()).await
}

/// Reads the same, when the tables of nftables are listed already. They are `None` where nftables cannot be read.
///
/// # Errors
/// As [`save`].
pub async fn save_among(
    flavour: Flavour,
    family: Family,
    nftables: Option<&[TableName]>,
) -> Result<Saved, ProgramError> {
    let program = program(flavour, family, "save");
    if has_no_tables(flavour, family, nftables) {
        return if is_in_path(&program) { Ok(Saved::default()) } else { Err(ProgramError::Missing { program }) };
    }
    let text = run(&program, &[], None).await?;
    // kube-proxy may have written a hundred thousand lines. They are parsed on another thread, so that the loop does not wait.
    let parsed = tokio::task::spawn_blocking(move || Saved::parse(&text)).await;
    parsed.map_err(|error| ProgramError::NotRun { program, source: io::Error::other(error) })
}

/// Writes changes. Of each table, all changes are written or none.
///
/// # Errors
/// As [`save`].
pub async fn restore(flavour: Flavour, family: Family, text: &str) -> Result<(), ProgramError> {
    let program = program(flavour, family, "restore");
    run(&program, &["--noflush", "-w", LOCK], Some(text)).await.map(drop)
}

/// Returns true if the kernel has a table of iptables, of any flavour and family. The tables of nftables are as for [`save_among`].
pub fn has_tables(nftables: Option<&[TableName]>) -> bool {
    Family::BOTH.into_iter().any(|family| !has_no_tables(Flavour::Plain, family, nftables))
}

fn has_no_tables(flavour: Flavour, family: Family, nftables: Option<&[TableName]>) -> bool {
    let has_no_legacy = || legacy_tables(family).trim().is_empty();
    // Where nftables cannot be read, the program is run, and says why.
    let has_no_nft = || nftables.is_some_and(|tables| !tables.iter().any(|table| table.is_of_iptables(family)));
    match flavour {
        Flavour::Legacy => has_no_legacy(),
        Flavour::Plain => has_no_legacy() && has_no_nft(),
        Flavour::Nft => has_no_nft(),
    }
}

/// Returns true if this namespace has that table of iptables-legacy. The question does not create the table.
pub fn has_legacy_table(family: Family, table: &str) -> bool {
    legacy_tables(family).lines().any(|line| line == table)
}

/// Returns the names of the tables of iptables-legacy in this namespace, one on each line.
pub fn legacy_tables(family: Family) -> String {
    std::fs::read_to_string(legacy_tables_file(family)).unwrap_or_default()
}

async fn run(program: &str, args: &[&str], input: Option<&str>) -> Result<String, ProgramError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => ProgramError::Missing { program: program.to_owned() },
        _ => ProgramError::NotRun { program: program.to_owned(), source: error },
    };
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(failed)?;
    let stdin = child.stdin.take();
    let write = async {
        if let (Some(mut stdin), Some(text)) = (stdin, input) {
            // When the program ends before it has read everything, what it prints says why.
            let _ = stdin.write_all(text.as_bytes()).await;
        }
    };
    let both = async { tokio::join!(write, child.wait_with_output()).1 };
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("it did not end within {} s", LIMIT.as_secs()));
    let out = tokio::time::timeout(LIMIT, both).await.map_err(|_| failed(late()))?.map_err(failed)?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    let stderr = if stderr.trim().is_empty() { out.status.to_string() } else { stderr };
    Err(ProgramError::Failed { program: program.to_owned(), stderr })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a program printed decides what the operator is told, and whether a flavour that cannot be read counts as one without rules.
    #[tokio::test]
    async fn a_program_gets_its_input_and_its_failure_says_what_it_printed() {
        let text = "*nat\nCOMMIT\n";
        assert_eq!(run("cat", &[], Some(text)).await.unwrap(), text);
        // It ends before it has read everything.
        assert_eq!(run("true", &[], Some(&text.repeat(100_000))).await.unwrap(), "");
        let missing = run("/nonexistent/iptables-save", &[], None).await;
        assert!(matches!(missing, Err(ProgramError::Missing { .. })), "{missing:?}");
        let not_run = run("/dev/null", &[], None).await;
        assert!(matches!(not_run, Err(ProgramError::NotRun { .. })), "{not_run:?}");
        for (does, said) in
            [("echo rules; echo locked >&2; exit 4", "locked\n"), ("echo rules; exit 4", "exit status: 4")]
        {
            let failed = run("sh", &["-c", does], None).await;
            assert!(matches!(&failed, Err(ProgramError::Failed { stderr, .. }) if stderr == said), "{failed:?}");
        }
    }
}
