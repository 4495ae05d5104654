// SPDX-License-Identifier: Apache-2.0
//! Traffic rules through the programs of iptables, for nodes whose other rules are there too: read with `iptables-save`,
//! written with `iptables-restore --noflush`, one transaction per table, only when something differs.

mod program;
pub mod render;
mod saved;

pub use program::{Failure, Flavour, has_legacy_table, has_tables, installed, legacy_tables, save};
pub use saved::{Saved, target};

use std::time::{Duration, Instant};

use tracing::{debug, info};
use weft_backends::masq::{FamilyRules, Rules};
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use crate::firewall::{Ensured, Failed, Firewall, Trouble};
use crate::instance::Instance;
use program::restore;
use render::Places;

/// Others write to the same tables: between reading and writing, a rule that we wanted to move may have gone.
const ATTEMPTS: usize = 3;
/// A flavour that was chosen for want of a sign is chosen again after this time.
const AGAIN: Duration = Duration::from_secs(30);
const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// Our chains in iptables.
#[derive(Debug)]
pub struct Iptables {
    places: Places,
    /// Chosen at the first need: the flavour that the node uses.
    flavour: Option<Flavour>,
    /// When to choose again; `None`: who uses which flavour was seen. At boot nobody does yet.
    again: Option<Instant>,
    /// The programs know `--random-fully` (iptables 1.6.2 does).
    random_fully: bool,
    /// Looked for at the first need.
    installed: Vec<Flavour>,
}

impl Iptables {
    /// Of this instance. Looks at nothing yet.
    pub fn open(instance: &Instance) -> Iptables {
        Iptables {
            places: Places::of(&instance.name),
            flavour: None,
            again: None,
            random_fully: true,
            installed: Vec::new(),
        }
    }

    async fn bring(&mut self, rules: &Rules) -> Result<Ensured, Failed> {
        if self.flavour.is_none() || self.again.is_some_and(|again| again <= Instant::now()) {
            self.choose().await.map_err(Failed::Look)?;
        }
        let Some(flavour) = self.flavour else {
            // Without programs there can be no rules of ours either.
            return if rules.is_empty() { Ok(Ensured::Same) } else { Err(Failed::Write(nothing_installed())) };
        };
        let mut written = false;
        for part in &rules.families {
            written |= self.bring_part(flavour, part.family, |_| part.clone()).await?;
        }
        // Only after ours are in: what an earlier run left where nothing is wanted any more, and in the other flavour. There a
        // FORWARD that drops needs our accepts too.
        for other in self.installed.clone() {
            for family in FAMILIES {
                let part = rules.of(family);
                if other == flavour && part.is_some() {
                    continue;
                }
                let forward = part.map(|part| part.forward.clone()).unwrap_or_default();
                let wanted = |saved: &Saved| FamilyRules {
                    family,
                    masquerade: Vec::new(),
                    forward: if saved.forward_drops() { forward.clone() } else { Vec::new() },
                };
                match self.bring_part(other, family, wanted).await {
                    Ok(true) if other == flavour => written = true,
                    // Nobody need have touched ours for that: no sign of somebody who changes our rules.
                    Ok(true) => info!(?family, "rules of ours in {other}: brought to what is wanted there"),
                    Ok(false) => {}
                    Err(trouble) => debug!("{other}: {trouble}"),
                }
            }
        }
        Ok(if written { Ensured::Written } else { Ensured::Same })
    }

    /// Chooses the flavour. One that cannot be read is no empty one: then nothing is chosen.
    async fn choose(&mut self) -> Result<(), Trouble> {
        self.installed = installed();
        let mut found = Vec::new();
        for flavour in &self.installed {
            match save(*flavour, Family::V4).await {
                Ok(saved) => found.push((*flavour, Traces::of(&saved))),
                Err(late @ Failure::Run(..)) => return Err(late.into()),
                // It has not the tables: nobody uses it.
                Err(Failure::Said(..) | Failure::Missing(_)) => found.push((*flavour, Traces::default())),
            }
        }
        let settled = found.len() < 2 || found.iter().any(|(_, traces)| traces.kube);
        self.again = (!settled).then(|| Instant::now() + AGAIN);
        if let Some((flavour, why)) = pick(&found)
            && self.flavour != Some(flavour)
        {
            info!("traffic rules go through {flavour}: {why}");
            self.flavour = Some(flavour);
        }
        Ok(())
    }

    /// Brings one family of one flavour to what is wanted in view of what is there; true when something was written.
    async fn bring_part(
        &mut self,
        flavour: Flavour,
        family: Family,
        wanted: impl Fn(&Saved) -> FamilyRules,
    ) -> Result<bool, Failed> {
        let mut failure = None;
        for attempt in 0..ATTEMPTS {
            let saved = save(flavour, family).await.map_err(|failure| Failed::Look(failure.into()))?;
            let Some(text) = render::changes(&saved, &self.places, &wanted(&saved), self.random_fully) else {
                return Ok(attempt > 0);
            };
            match restore(flavour, family, &text).await {
                Ok(()) => return Ok(true),
                Err(error) if self.random_fully && error.said().contains("random-fully") => self.random_fully = false,
                Err(error) => {
                    debug!("{flavour}: attempt {}: {}", attempt + 1, error.said());
                    failure = Some(error);
                }
            }
        }
        Err(Failed::Write(failure.map_or_else(|| Trouble(format!("{flavour} takes no rule")), Trouble::from)))
    }
}

impl Firewall for Iptables {
    fn describe(&self) -> String {
        let name = self.flavour.map_or_else(|| "iptables".to_owned(), |flavour| flavour.to_string());
        format!("{name}, chains {} and {}", self.places.masquerade.chain, self.places.forward.chain)
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, Failed>> {
        Box::pin(self.bring(rules))
    }

    fn remove(&mut self) -> Local<'_, Result<bool, Trouble>> {
        Box::pin(async { Ok(!remove_all(&self.places).await?.is_empty()) })
    }

    fn disturbed(&mut self) -> Local<'_, ()> {
        // iptables tells nobody: the resync looks again.
        Box::pin(std::future::pending())
    }
}

/// Removes what flannel left: its chains and the jumps to them, from both flavours and families. Returns what was removed;
/// nothing where there are no programs, and so nobody wrote such rules.
///
/// # Errors
/// When a program that is there refuses.
pub async fn remove_flannels() -> Result<Vec<String>, Trouble> {
    remove_all(&Places::flannels()).await
}

async fn remove_all(places: &Places) -> Result<Vec<String>, Trouble> {
    let mut removed = Vec::new();
    for flavour in installed() {
        for family in FAMILIES {
            let saved = match save(flavour, family).await {
                Ok(saved) => saved,
                Err(late @ Failure::Run(..)) => return Err(late.into()),
                // A family that the kernel lacks has no rules.
                Err(Failure::Said(..) | Failure::Missing(_)) => continue,
            };
            if let Some(text) = render::removal(&saved, places) {
                restore(flavour, family, &text).await?;
                let chains = render::present(&saved, places);
                removed.extend(chains.iter().map(|chain| format!("{flavour} {family:?} chain {chain}")));
            }
        }
    }
    Ok(removed)
}

fn nothing_installed() -> Trouble {
    let names = "iptables-restore, iptables-nft-restore or iptables-legacy-restore";
    Trouble(format!("none of {names} is in PATH: install the package iptables, or choose --firewall=nft"))
}

/// What tells who uses a flavour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traces {
    /// kubelet or kube-proxy made a chain there.
    pub kube: bool,
    /// FORWARD drops there what nobody accepts: Docker sets that.
    pub drops: bool,
    /// Rules there, of anybody.
    pub rules: usize,
}

impl Traces {
    /// From the IPv4 tables.
    pub fn of(saved: &Saved) -> Traces {
        let kube = saved.chains().any(|name| name.starts_with("KUBE-"));
        Traces { kube, drops: saved.forward_drops(), rules: saved.rules() }
    }
}

/// As kubelet's hint chains are meant: where they are is where rules go; else where FORWARD drops; else where more rules are; else nf_tables.
fn pick(found: &[(Flavour, Traces)]) -> Option<(Flavour, &'static str)> {
    if let [(only, _)] = found {
        return Some((*only, "no other is installed"));
    }
    if let Some((flavour, _)) = found.iter().find(|(_, traces)| traces.kube) {
        return Some((*flavour, "kubelet or kube-proxy has chains there"));
    }
    if let Some((flavour, _)) = found.iter().find(|(_, traces)| traces.drops) {
        return Some((*flavour, "FORWARD drops there"));
    }
    let (flavour, traces) = found.iter().rev().max_by_key(|(_, traces)| traces.rules)?;
    Some((*flavour, if traces.rules > 0 { "most rules are there" } else { "no rules are anywhere yet" }))
}

#[cfg(test)]
mod tests {
    use super::{Flavour, Traces, pick};

    #[test]
    fn the_flavour_is_that_of_the_node() {
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
}
