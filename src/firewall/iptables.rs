// SPDX-License-Identifier: Apache-2.0
//! The rules in iptables, for nodes where other programs have their rules there too. They are read with `iptables-save` and, only when
//! something differs, written with `iptables-restore --noflush`, in one transaction for each table.

mod meaning;
mod program;
pub mod render;

pub use meaning::{forward_drops, forward_ending};
pub use program::{Flavour, has_legacy_table, has_tables, installed, legacy_tables, save, save_among};

use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, info};
use weft_backends::traffic_rules::{FamilyRules, Rules};
use weft_cni::iptables::Saved;
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use super::error::{FirewallError, ProgramError};
use super::nft::tables::tables;
use super::packet_filter::{EnsureError, Ensured, PacketFilter};
use crate::instance::Instance;
use program::restore;
use render::HookedChains;

/// How often a write is tried. Other programs write to the same tables, so a rule that we read may be gone when we move it.
const ATTEMPTS: usize = 3;
/// When nothing showed which flavour the node uses, the choice is made again after this time.
const CHOOSE_AGAIN: Duration = Duration::from_secs(30);

/// The chains of one agent.
#[derive(Debug)]
pub struct Iptables {
    chains: HookedChains,
    /// The flavour that the node uses, once it was chosen.
    flavour: Option<Flavour>,
    /// When to choose again. `None` if the choice is final, because somebody uses the flavour. At boot nobody does yet.
    choose_again: Option<Instant>,
    /// The programs know `--random-fully`, as those of iptables 1.6.2 and later do.
    random_fully: bool,
    /// The flavours that are installed, after the programs were searched.
    installed: Vec<Flavour>,
}

impl Iptables {
    /// Returns the chains of this agent. Nothing is read yet.
    pub fn new(instance: &Instance) -> Iptables {
        Iptables {
            chains: HookedChains::of(&instance.name),
            flavour: None,
            choose_again: None,
            random_fully: true,
            installed: Vec::new(),
        }
    }

    async fn bring(&mut self, rules: &Rules) -> Result<Ensured, EnsureError> {
        if self.flavour.is_none() || self.choose_again.is_some_and(|at| at <= Instant::now()) {
            self.choose().await.map_err(EnsureError::Read)?;
        }
        let Some(flavour) = self.flavour else {
            // Without programs no rules of ours can be there.
            return if rules.is_empty() {
                Ok(Ensured::Unchanged)
            } else {
                Err(EnsureError::Write(FirewallError::NoPrograms))
            };
        };
        let mut written = false;
        for part in &rules.families {
            written |= self.bring_part(flavour, part.family, |_| part.clone()).await?;
        }
        // When our rules are in place, those that an earlier run left in the other flavour, or in a family that is no longer wanted,
        // are removed. In the other flavour the forward rules are needed too, if its FORWARD drops packets.
        for other in self.installed.clone() {
            for family in Family::BOTH {
                let part = rules.of(family);
                if other == flavour && part.is_some() {
                    continue;
                }
                let forward = part.map(|part| part.forward.clone()).unwrap_or_default();
                let wanted = |saved: &Saved| FamilyRules {
                    family,
                    masquerade: Vec::new(),
                    forward: if forward_drops(saved) { forward.clone() } else { Vec::new() },
                };
                match self.bring_part(other, family, wanted).await {
                    Ok(true) if other == flavour => written = true,
                    // This does not count as a write, because it is no sign that another program changed our rules.
                    Ok(true) => info!(?family, "changed our rules in {other}, the flavour that is not in use"),
                    Ok(false) => {}
                    Err(error) => debug!("{other}: {error}"),
                }
            }
        }
        Ok(if written { Ensured::Written } else { Ensured::Unchanged })
    }

    /// Chooses the flavour. Nothing is chosen when one of them cannot be read, because it may have rules.
    async fn choose(&mut self) -> Result<(), FirewallError> {
        self.installed = installed();
        let mut found = Vec::new();
        let nftables = tables().await.ok();
        for flavour in &self.installed {
            let saved = save_among(*flavour, Family::V4, nftables.as_deref()).await;
            found.push((*flavour, traces(saved)?));
        }
        let settled = found.len() < 2 || found.iter().any(|(_, traces)| traces.kube);
        self.choose_again = (!settled).then(|| Instant::now() + CHOOSE_AGAIN);
        if let Some((flavour, why)) = pick(&found)
            && self.flavour != Some(flavour)
        {
            info!("the traffic rules are written with {flavour}: {why}");
            self.flavour = Some(flavour);
        }
        Ok(())
    }

    /// Brings one family of one flavour to what is wanted, which may depend on what is there. Returns true if something was written.
    async fn bring_part(
        &mut self,
        flavour: Flavour,
        family: Family,
        wanted: impl Fn(&Saved) -> FamilyRules,
    ) -> Result<bool, EnsureError> {
        let mut attempt = 1;
        loop {
            let saved = save(flavour, family).await.map_err(|error| EnsureError::Read(error.into()))?;
            let Some(text) = render::changes(&saved, &self.chains, &wanted(&saved), self.random_fully) else {
                return Ok(attempt > 1);
            };
            match restore(flavour, family, &text).await {
                Ok(()) => return Ok(true),
                Err(error) if self.random_fully && error.stderr().contains("random-fully") => self.random_fully = false,
                Err(error) if attempt >= ATTEMPTS => return Err(EnsureError::Write(error.into())),
                Err(error) => debug!("{flavour}: attempt {attempt}: {}", error.stderr()),
            }
            attempt += 1;
        }
    }
}

impl PacketFilter for Iptables {
    fn describe(&self) -> String {
        let name = self.flavour.map_or_else(|| "iptables".to_owned(), |flavour| flavour.to_string());
        format!("{name}, chains {} and {}", self.chains.masquerade.chain, self.chains.forward.chain)
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, EnsureError>> {
        Box::pin(self.bring(rules))
    }

    fn remove(&mut self) -> Local<'_, Result<bool, FirewallError>> {
        Box::pin(async { Ok(!remove_all(&self.chains).await?.is_empty()) })
    }

    fn changed(&mut self) -> Local<'_, ()> {
        // iptables does not notify anybody. Changes are found at the next resync.
        Box::pin(std::future::pending())
    }
}

/// Removes the chains of flannel and the jumps to them, from both flavours and families. Returns what was removed, for people. Without
/// programs of iptables nothing can be removed, and nobody can have written such rules.
///
/// # Errors
/// A program failed, or did not end in time.
pub async fn remove_flannel_chains() -> Result<Vec<String>, FirewallError> {
    remove_all(&HookedChains::of_flannel()).await
}

async fn remove_all(chains: &HookedChains) -> Result<Vec<String>, FirewallError> {
    let mut removed = Vec::new();
    let nftables = tables().await.ok();
    for flavour in installed() {
        for family in Family::BOTH {
            let saved = match save_among(flavour, family, nftables.as_deref()).await {
                Ok(saved) => saved,
                Err(error @ ProgramError::NotRun { .. }) => return Err(error.into()),
                // The kernel does not have this family, so there are no rules.
                Err(ProgramError::Failed { .. } | ProgramError::Missing { .. }) => continue,
            };
            if let Some(text) = render::removal(&saved, chains) {
                restore(flavour, family, &text).await?;
                let present = render::present(&saved, chains);
                removed.extend(present.iter().map(|chain| format!("{flavour} {family:?} chain {chain}")));
            }
        }
    }
    Ok(removed)
}

/// What shows that a flavour is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traces {
    /// There is a chain of kubelet or kube-proxy.
    pub kube: bool,
    /// FORWARD drops packets that no rule accepts. Docker sets that policy.
    pub drops: bool,
    /// The number of rules, of any program.
    pub rules: usize,
}

impl Traces {
    /// Returns what the IPv4 tables show.
    pub fn of(saved: &Saved) -> Traces {
        let kube = saved.chains().any(|name| name.starts_with("KUBE-"));
        Traces { kube, drops: forward_drops(saved), rules: meaning::rules(saved) }
    }
}

/// Returns what the answer of a program shows. A program that could not be run says nothing about the rules.
fn traces(answer: Result<Saved, ProgramError>) -> Result<Traces, FirewallError> {
    match answer {
        Ok(saved) => Ok(Traces::of(&saved)),
        Err(error @ ProgramError::NotRun { .. }) => Err(error.into()),
        // The kernel has no tables of this flavour, so nobody uses it.
        Err(ProgramError::Failed { .. } | ProgramError::Missing { .. }) => Ok(Traces::default()),
    }
}

/// Chooses the flavour with the chains of kubelet, which are meant as a hint; else the one whose FORWARD drops packets; else the one with
/// more rules; else nf_tables.
fn pick(found: &[(Flavour, Traces)]) -> Option<(Flavour, &'static str)> {
    if let [(only, _)] = found {
        return Some((*only, "no other flavour is installed"));
    }
    if let Some((flavour, _)) = found.iter().find(|(_, traces)| traces.kube) {
        return Some((*flavour, "kubelet or kube-proxy has chains in it"));
    }
    if let Some((flavour, _)) = found.iter().find(|(_, traces)| traces.drops) {
        return Some((*flavour, "its chain FORWARD drops packets"));
    }
    let (flavour, traces) = found.iter().rev().max_by_key(|(_, traces)| traces.rules)?;
    Some((*flavour, if traces.rules > 0 { "it has the most rules" } else { "no flavour has rules yet" }))
}

#[cfg(test)]
mod tests {
    use super::{Flavour, ProgramError, Saved, Traces, pick, traces};

    #[test]
    fn the_flavour_that_the_node_uses_is_chosen() {
        let traces = |kube, rules| Traces { kube, rules, drops: false };
        let both = |nft, legacy| vec![(Flavour::Nft, nft), (Flavour::Legacy, legacy)];
        for (what, found, wanted) in [
            ("nothing installed", vec![], None),
            ("one installed", vec![(Flavour::Legacy, traces(false, 0))], Some(Flavour::Legacy)),
            ("only the plain one", vec![(Flavour::Plain, traces(false, 9))], Some(Flavour::Plain)),
            ("no rules", both(traces(false, 0), traces(false, 0)), Some(Flavour::Nft)),
            ("canary in nft", both(traces(true, 1), traces(false, 50)), Some(Flavour::Nft)),
            ("canary in legacy", both(traces(false, 50), traces(true, 1)), Some(Flavour::Legacy)),
            ("canaries in both", both(traces(true, 1), traces(true, 50)), Some(Flavour::Nft)),
            ("Docker in legacy", both(traces(false, 0), traces(false, 12)), Some(Flavour::Legacy)),
            ("Docker in nft", both(traces(false, 12), traces(false, 0)), Some(Flavour::Nft)),
            (
                "FORWARD drops in legacy",
                both(traces(false, 3), Traces { drops: true, ..traces(false, 0) }),
                Some(Flavour::Legacy),
            ),
            ("as many in both", both(traces(false, 3), traces(false, 3)), Some(Flavour::Nft)),
        ] {
            assert_eq!(pick(&found).map(|(flavour, _)| flavour), wanted, "{what}");
        }
    }

    #[test]
    fn a_flavour_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let program = || "iptables-nft-save".to_owned();
        let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
        assert!(traces(Err(ProgramError::NotRun { program: program(), source: late })).is_err());
        let failed = ProgramError::Failed { program: program(), stderr: "no such table".to_owned() };
        for empty in [Ok(Saved::default()), Err(failed), Err(ProgramError::Missing { program: program() })] {
            assert_eq!(traces(empty).unwrap(), Traces::default());
        }
        let docker = Saved::parse("*filter\n:FORWARD DROP [0:0]\nCOMMIT\n");
        assert!(traces(Ok(docker)).unwrap().drops);
    }
}
