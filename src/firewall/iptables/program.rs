// SPDX-License-Identifier: Apache-2.0
//! The programs of iptables: which there are, and running one within a time limit. Nothing here blocks the caller's thread.

use std::fmt;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use nix::unistd::{AccessFlags, access};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use weft_subnet::cidr::Family;

use super::saved::Saved;
use crate::firewall::Trouble;
use crate::firewall::nft::tables::tables;

/// For one program. It waits [`LOCK`] of it for others that write.
const LIMIT: Duration = Duration::from_secs(15);
/// Seconds for `-w`.
const LOCK: &str = "5";
/// Names of the legacy tables that this namespace has, one a line; opening a table that is not there would create it.
const LEGACY_TABLES: [&str; 2] = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];

/// One of the two sets of tables in the kernel that programs called iptables write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// `iptables-nft`: tables of nf_tables.
    Nft,
    /// `iptables-legacy`: those of ip_tables.
    Legacy,
    /// `iptables` without its twin: whichever of the two was installed.
    Plain,
}

impl Flavour {
    /// All, in the order in which they are looked for.
    pub const ALL: [Flavour; 3] = [Flavour::Nft, Flavour::Legacy, Flavour::Plain];

    fn program(self, family: Family, end: &str) -> String {
        let six = if family == Family::V6 { "6" } else { "" };
        let flavour = match self {
            Flavour::Nft => "-nft",
            Flavour::Legacy => "-legacy",
            Flavour::Plain => "",
        };
        format!("ip{six}tables{flavour}-{end}")
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Flavour::Nft => "iptables-nft",
            Flavour::Legacy => "iptables-legacy",
            Flavour::Plain => "iptables",
        })
    }
}

/// Why a program did not do it.
#[derive(Debug)]
pub enum Failure {
    /// There is no such program.
    Missing(String),
    /// It said so.
    Said(String, String),
    /// It could not be run, or did not end in time.
    Run(String, io::Error),
}

impl Failure {
    /// What it said, if it ran.
    pub fn said(&self) -> &str {
        match self {
            Failure::Said(_, text) => text,
            Failure::Missing(_) | Failure::Run(..) => "",
        }
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble(match failure {
            Failure::Missing(program) => {
                format!("run {program}: not in PATH; install the package iptables, or choose --firewall=nft")
            }
            Failure::Said(program, text) => format!("run {program}: {}{}", one_line(&text), remedy(&text)),
            Failure::Run(program, error) => format!("run {program}: {error}"),
        })
    }
}

/// The lines that say something: the end of long ones is a hint at --help.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("Try `"));
    lines.take(3).collect::<Vec<_>>().join("; ")
}

/// What to do, for what is known to go wrong.
fn remedy(text: &str) -> &'static str {
    let has = |word: &str| text.to_lowercase().contains(word);
    if has("permission denied") || has("operation not permitted") {
        "; the agent needs CAP_NET_ADMIN"
    } else if has("xtables lock") {
        "; another program holds it: see `fuser /run/xtables.lock`"
    } else if has("table does not exist") || has("insmod") || has("failed to initialize nft") {
        "; the kernel lacks the table: `modprobe iptable_nat iptable_filter` (ip6table_... for IPv6), or choose --firewall=nft"
    } else if has("missing kernel module") || has("couldn't load") || has("no chain/target/match by that name") {
        "; the kernel lacks a match or target: `modprobe xt_MASQUERADE xt_mark`, or choose --firewall=nft"
    } else if has("incompatible") {
        "; another program wrote rules there that iptables cannot read: choose --firewall=nft"
    } else {
        ""
    }
}

/// The flavours whose programs are in PATH: the two that say what they are, else the plain one. Whether they work is seen when they run.
pub fn installed() -> Vec<Flavour> {
    let mut found = Vec::new();
    for flavour in Flavour::ALL {
        // The plain one is one of the others, when they are there.
        if flavour == Flavour::Plain && !found.is_empty() {
            break;
        }
        if is_in_path(&flavour.program(Family::V4, "restore")) {
            found.push(flavour);
        }
    }
    found
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).any(|dir| access(&dir.join(program), AccessFlags::X_OK).is_ok())
}

/// What is in the kernel. No program runs where the kernel says that there is nothing.
pub async fn save(flavour: Flavour, family: Family) -> Result<Saved, Failure> {
    let program = flavour.program(family, "save");
    if has_no_tables(flavour, family).await {
        return if is_in_path(&program) { Ok(Saved::default()) } else { Err(Failure::Missing(program)) };
    }
    let text = run(&program, &[], None).await?;
    // kube-proxy may have a hundred thousand lines there: the loop does not wait for the reading of them.
    let parsed = tokio::task::spawn_blocking(move || Saved::parse(&text)).await;
    parsed.map_err(|error| Failure::Run(program, io::Error::other(error)))
}

/// Writes changes: all of each table, or nothing of it.
pub async fn restore(flavour: Flavour, family: Family, text: &str) -> Result<(), Failure> {
    let program = flavour.program(family, "restore");
    run(&program, &["--noflush", "-w", LOCK], Some(text)).await.map(drop)
}

/// Whether iptables of any flavour or family has a table.
pub async fn has_tables() -> bool {
    !has_no_tables(Flavour::Plain, Family::V4).await || !has_no_tables(Flavour::Plain, Family::V6).await
}

async fn has_no_tables(flavour: Flavour, family: Family) -> bool {
    let legacy = legacy_tables(family).trim().is_empty();
    match flavour {
        Flavour::Legacy => legacy,
        Flavour::Plain if !legacy => false,
        // Where nftables cannot be asked, the program says why.
        Flavour::Plain | Flavour::Nft => {
            tables().await.is_ok_and(|tables| !tables.iter().any(|table| table.is_of_iptables(family)))
        }
    }
}

/// Whether this namespace has that table of iptables-legacy. Makes none by looking.
pub fn has_legacy_table(family: Family, table: &str) -> bool {
    legacy_tables(family).lines().any(|line| line == table)
}

/// Names of the tables of iptables-legacy that this namespace has, one a line.
pub fn legacy_tables(family: Family) -> String {
    std::fs::read_to_string(LEGACY_TABLES[usize::from(family == Family::V6)]).unwrap_or_default()
}

async fn run(program: &str, args: &[&str], input: Option<&str>) -> Result<String, Failure> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failure::Missing(program.to_owned()),
        _ => Failure::Run(program.to_owned(), error),
    };
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(failed)?;
    let stdin = child.stdin.take();
    let write = async {
        if let (Some(mut stdin), Some(text)) = (stdin, input) {
            // It ended before it read all: what it says tells why.
            let _ = stdin.write_all(text.as_bytes()).await;
        }
    };
    let both = async { tokio::join!(write, child.wait_with_output()).1 };
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no end after {} s", LIMIT.as_secs()));
    let out = tokio::time::timeout(LIMIT, both).await.map_err(|_| failed(late()))?.map_err(failed)?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    Err(Failure::Said(program.to_owned(), if said.trim().is_empty() { out.status.to_string() } else { said }))
}

#[cfg(test)]
mod tests {
    use super::{Failure, Flavour};
    use crate::firewall::Trouble;
    use weft_subnet::cidr::Family;

    #[test]
    fn programs_of_each_flavour_and_family() {
        assert_eq!(Flavour::Nft.program(Family::V4, "restore"), "iptables-nft-restore");
        assert_eq!(Flavour::Legacy.program(Family::V6, "save"), "ip6tables-legacy-save");
        assert_eq!(Flavour::Plain.program(Family::V6, "restore"), "ip6tables-restore");
    }

    #[test]
    fn trouble_names_the_program_and_the_remedy() {
        let program = || "iptables-legacy-restore".to_owned();
        for (failure, wanted) in [
            (Failure::Missing(program()), "install the package iptables"),
            (
                Failure::Said(program(), "iptables-restore v1.8.9 (legacy): unable to initialize table 'nat'\n\nError occurred at line: 1\nTry `iptables-restore -h'\n modprobe: FATAL: insmod".into()),
                "modprobe iptable_nat",
            ),
            (
                Failure::Said(program(), "iptables v1.8.9 (legacy): can't initialize iptables table `nat': Table does not exist (do you need to insmod?)".into()),
                "modprobe iptable_nat",
            ),
            (Failure::Said(program(), "Another app is currently holding the xtables lock".into()), "fuser"),
            (
                Failure::Said(program(), "can't initialize iptables table `nat': Permission denied (you must be root)".into()),
                "CAP_NET_ADMIN",
            ),
        ] {
            let Trouble(text) = failure.into();
            assert!(text.starts_with("run iptables-legacy-restore: ") && text.contains(wanted), "{text}");
            assert!(!text.contains('\n') && !text.contains("Try `iptables"), "{text}");
        }
    }
}
