// SPDX-License-Identifier: Apache-2.0
//! Why traffic rules could not be read, written or removed. Each error is a sentence for the operator, with the remedy where one is known.

use std::io;

use nix::errno::Errno;
use weft_netlink::nftables;
use weft_netlink::socket::Refusal;

/// What a packet filter could not do.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    /// The netlink socket of nftables cannot be opened, or a request got no complete answer.
    #[error("read the rules in nftables: {0}{remedy}", remedy = nftables_remedy(.0))]
    Nftables(#[from] io::Error),
    /// The kernel refused the transaction, so nothing was changed.
    #[error("change the rules in nftables: {}", refusal(.0))]
    Refused(Refusal),
    /// Rules are wanted, and no program of iptables is installed.
    #[error(
        "none of iptables-restore, iptables-nft-restore or iptables-legacy-restore is in PATH: install the package iptables, or \
         choose --firewall=nft"
    )]
    NoPrograms,
    /// A program of iptables did not do its work.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl FirewallError {
    /// Returns true if the kernel has no nftables, so that no rule can be there.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, FirewallError::Nftables(error) if nftables::is_unsupported(error))
    }
}

/// What became of a program of iptables that did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The program is not installed.
    #[error("run {program}: it is not in PATH; install the package iptables, or choose --firewall=nft")]
    Missing {
        /// Its name.
        program: String,
    },
    /// The program ended with an error.
    #[error("run {program}: {}{}", one_line(.stderr), program_remedy(.stderr))]
    Failed {
        /// Its name.
        program: String,
        /// What it printed, or its exit status when it printed nothing.
        stderr: String,
    },
    /// The program could not be started, or did not end in time.
    #[error("run {program}: {source}")]
    NotRun {
        /// Its name.
        program: String,
        /// Why.
        source: io::Error,
    },
}

impl ProgramError {
    /// Returns what the program printed; empty when it did not run.
    pub fn stderr(&self) -> &str {
        match self {
            ProgramError::Failed { stderr, .. } => stderr,
            ProgramError::Missing { .. } | ProgramError::NotRun { .. } => "",
        }
    }
}

fn refusal(refusal: &Refusal) -> String {
    let error = io::Error::from(refusal.errno);
    let explanation = if refusal.text.is_empty() { String::new() } else { format!(": {}", refusal.text) };
    format!("{error}{explanation}{}", nftables_remedy(&error))
}

fn nftables_remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => "; run as root or with CAP_NET_ADMIN",
        Some(Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EINVAL | Errno::EAFNOSUPPORT) => {
            "; if the kernel lacks nf_tables or nft_masq, load them or give --firewall=iptables"
        }
        _ => "",
    }
}

/// Returns the first lines that say something. Programs of iptables end a long message with a hint at `--help`.
fn one_line(stderr: &str) -> String {
    let lines = stderr.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("Try `"));
    lines.take(3).collect::<Vec<_>>().join("; ")
}

fn program_remedy(stderr: &str) -> &'static str {
    let has = |word: &str| stderr.to_lowercase().contains(word);
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

#[cfg(test)]
mod tests {
    use super::{Errno, FirewallError, ProgramError, Refusal};

    #[test]
    fn errors_of_programs_name_the_program_and_the_remedy() {
        let program = || "iptables-legacy-restore".to_owned();
        let failed = |stderr: &str| ProgramError::Failed { program: program(), stderr: stderr.to_owned() };
        for (error, wanted) in [
            (ProgramError::Missing { program: program() }, "install the package iptables"),
            (
                failed(
                    "iptables-restore v1.8.9 (legacy): unable to initialize table 'nat'\n\nError occurred at line: 1\nTry `iptables-restore -h'\n modprobe: FATAL: insmod",
                ),
                "modprobe iptable_nat",
            ),
            (
                failed(
                    "iptables v1.8.9 (legacy): can't initialize iptables table `nat': Table does not exist (do you need to insmod?)",
                ),
                "modprobe iptable_nat",
            ),
            (failed("Another app is currently holding the xtables lock"), "fuser"),
            (failed("can't initialize iptables table `nat': Permission denied (you must be root)"), "CAP_NET_ADMIN"),
            (failed("iptables v1.8.9 (nf_tables): Could not fetch rule set: Operation not permitted"), "CAP_NET_ADMIN"),
            (failed("iptables: Failed to initialize nft: Protocol not supported"), "modprobe iptable_nat"),
            (failed("Couldn't load match `mark'"), "modprobe xt_MASQUERADE"),
            (failed("iptables: No chain/target/match by that name."), "modprobe xt_MASQUERADE"),
            (
                failed("Warning: Extension MASQUERADE revision 0 not supported, missing kernel module?"),
                "modprobe xt_MASQUERADE",
            ),
            (failed("table `nat' is incompatible, use 'nft' tool."), "choose --firewall=nft"),
        ] {
            let text = error.to_string();
            assert!(text.starts_with("run iptables-legacy-restore: ") && text.contains(wanted), "{text}");
            assert!(!text.contains('\n') && !text.contains("Try `iptables"), "{text}");
        }
    }

    #[test]
    fn errors_of_nftables_say_what_to_do() {
        let refused = |errno, text: &str| {
            FirewallError::Refused(Refusal { seq: 0, errno, code: errno as i32, text: text.to_owned() })
        };
        for (error, wanted) in [
            (refused(Errno::EPERM, ""), "(os error 1); run as root or with CAP_NET_ADMIN"),
            (FirewallError::Nftables(Errno::EACCES.into()), "; run as root or with CAP_NET_ADMIN"),
            (refused(Errno::ENOENT, "no such expression"), ": no such expression; if the kernel lacks nf_tables"),
            (refused(Errno::EOPNOTSUPP, ""), "; if the kernel lacks nf_tables"),
            (refused(Errno::EINVAL, ""), "; if the kernel lacks nf_tables"),
            (FirewallError::Nftables(Errno::EAFNOSUPPORT.into()), "; if the kernel lacks nf_tables"),
            (FirewallError::Nftables(Errno::EPROTONOSUPPORT.into()), "give --firewall=iptables"),
            (refused(Errno::ENOSPC, ""), "(os error 28)"),
        ] {
            assert!(error.to_string().contains(wanted), "{error}");
        }
        assert!(refused(Errno::ENOSPC, "").to_string().ends_with("(os error 28)"), "no remedy is made up");
    }

    /// A kernel that refuses to remove a rule has nftables.
    #[test]
    fn only_a_question_that_fails_shows_a_kernel_without_nftables() {
        let refused = FirewallError::Refused(Refusal {
            seq: 0,
            errno: Errno::EINVAL,
            code: Errno::EINVAL as i32,
            text: String::new(),
        });
        assert!(FirewallError::Nftables(Errno::EINVAL.into()).is_unsupported() && !refused.is_unsupported());
    }
}
