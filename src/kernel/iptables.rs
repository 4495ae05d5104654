// SPDX-License-Identifier: Apache-2.0
//! Traffic rules through the programs of iptables, for nodes whose other rules are there too: read with `iptables-save`,
//! written with `iptables-restore --noflush`, one transaction per table, only when something differs.

mod program;
mod render;
mod saved;

pub use program::{Failure, Flavour, installed, save};
pub use saved::{Saved, target};

use tracing::{debug, info};
use weft_backends::masq::{FamilyRules, Rules};
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use crate::rules::{Ensured, Firewall, Instance, Trouble};
use program::restore;
use render::Places;

/// Others write to the same tables: between reading and writing, a rule that we wanted to move may have gone.
const ATTEMPTS: usize = 3;
const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// Our chains in iptables.
#[derive(Debug)]
pub struct Iptables {
    places: Places,
    /// Chosen at the first need: the flavour that the node uses.
    flavour: Option<Flavour>,
    /// The programs know `--random-fully` (iptables 1.6.2 does).
    random_fully: bool,
    /// The families wanted when what is not wanted was last looked for, and removed: an earlier run's, the other flavour's.
    swept: Option<[bool; 2]>,
}

impl Iptables {
    /// Of this instance. Looks at nothing yet.
    pub fn open(instance: &Instance) -> Iptables {
        Iptables { places: Places::of(&instance.name), flavour: None, random_fully: true, swept: None }
    }

    async fn bring(&mut self, rules: &Rules) -> Result<Ensured, Trouble> {
        if self.flavour.is_none() {
            self.flavour = self.choose().await;
        }
        let Some(flavour) = self.flavour else {
            // Without programs there can be no rules of ours either.
            return if rules.is_empty() { Ok(Ensured::Same) } else { Err(nothing_installed()) };
        };
        let mut written = false;
        for rules in &rules.families {
            written |= self.bring_family(flavour, rules).await?;
        }
        let wanted = FAMILIES.map(|family| rules.of(family).is_some());
        if self.swept != Some(wanted) {
            written |= self.sweep(flavour, rules).await;
            self.swept = Some(wanted);
        }
        Ok(if written { Ensured::Written } else { Ensured::Same })
    }

    /// Removes our chains from families that have no rules, and from the other flavour: only after ours are in.
    async fn sweep(&self, flavour: Flavour, rules: &Rules) -> bool {
        let mut written = false;
        for one in installed().await {
            for family in FAMILIES {
                if one != flavour || rules.of(family).is_none() {
                    written |= remove_from(one, family, &self.places).await;
                }
            }
        }
        written
    }

    async fn choose(&self) -> Option<Flavour> {
        let (flavour, why) = usual(&installed().await).await?;
        info!("traffic rules go through {flavour}: {why}");
        Some(flavour)
    }

    /// True when something was written.
    async fn bring_family(&mut self, flavour: Flavour, rules: &FamilyRules) -> Result<bool, Trouble> {
        let mut failure = None;
        for attempt in 0..ATTEMPTS {
            let saved = save(flavour, rules.family).await?;
            let Some(text) = render::changes(&saved, &self.places, rules, self.random_fully) else {
                return Ok(attempt > 0);
            };
            match restore(flavour, rules.family, &text).await {
                Ok(()) => return Ok(true),
                Err(error) if self.random_fully && error.said().contains("random-fully") => self.random_fully = false,
                Err(error) => {
                    debug!("{flavour}: attempt {}: {}", attempt + 1, error.said());
                    failure = Some(error);
                }
            }
        }
        Err(failure.map_or_else(|| Trouble(format!("{flavour} takes no rule")), Trouble::from))
    }
}

impl Firewall for Iptables {
    fn describe(&self) -> String {
        let name = self.flavour.map_or_else(|| "iptables".to_owned(), |flavour| flavour.to_string());
        format!("{name}, chains {} and {}", self.places.masquerade.chain, self.places.forward.chain)
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, Trouble>> {
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
    for flavour in installed().await {
        for family in FAMILIES {
            // A family that the kernel lacks has no rules.
            let Ok(saved) = save(flavour, family).await else { continue };
            if let Some(text) = render::removal(&saved, places) {
                restore(flavour, family, &text).await?;
                let chains = render::present(&saved, places);
                removed.extend(chains.iter().map(|chain| format!("{flavour} {family:?} chain {chain}")));
            }
        }
    }
    Ok(removed)
}

/// Removes our chains of one family; true when there were some. What does not work here is no trouble: nothing is wanted there.
async fn remove_from(flavour: Flavour, family: Family, places: &Places) -> bool {
    let Ok(saved) = save(flavour, family).await else { return false };
    let Some(text) = render::removal(&saved, places) else { return false };
    match restore(flavour, family, &text).await {
        Ok(()) => true,
        Err(error) => {
            debug!("{flavour}: chains that are not wanted any more stay: {}", error.said());
            false
        }
    }
}

fn nothing_installed() -> Trouble {
    let names = "iptables-restore, iptables-nft-restore or iptables-legacy-restore";
    Trouble(format!("none of {names} is in PATH: install the package iptables, or choose --firewall=nft"))
}

/// The flavour that the node uses, of those installed, and why.
async fn usual(installed: &[Flavour]) -> Option<(Flavour, &'static str)> {
    let mut found = Vec::new();
    for flavour in installed {
        let saved = save(*flavour, Family::V4).await.unwrap_or_default();
        found.push((*flavour, Traces::of(&saved)));
    }
    pick(&found)
}

/// What tells who uses a flavour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traces {
    /// kubelet or kube-proxy made a chain there.
    pub kube: bool,
    /// Rules there, of anybody.
    pub rules: usize,
}

impl Traces {
    /// From the IPv4 tables.
    pub fn of(saved: &Saved) -> Traces {
        Traces { kube: saved.chains().any(|name| name.starts_with("KUBE-")), rules: saved.rules() }
    }
}

/// As kubelet's hint chains are meant: where they are is where rules go; else where more rules are; else nf_tables.
fn pick(found: &[(Flavour, Traces)]) -> Option<(Flavour, &'static str)> {
    if let [(only, _)] = found {
        return Some((*only, "no other is installed"));
    }
    if let Some((flavour, _)) = found.iter().find(|(_, traces)| traces.kube) {
        return Some((*flavour, "kubelet or kube-proxy has chains there"));
    }
    let (flavour, traces) = found.iter().rev().max_by_key(|(_, traces)| traces.rules)?;
    Some((*flavour, if traces.rules > 0 { "most rules are there" } else { "no rules are anywhere yet" }))
}

#[cfg(test)]
mod tests {
    use super::{Flavour, Traces, pick};

    #[test]
    fn the_flavour_is_that_of_the_node() {
        let traces = |kube, rules| Traces { kube, rules };
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
            ("as many in both", both(traces(false, 3), traces(false, 3)), Some(Flavour::Nft)),
        ] {
            assert_eq!(pick(&found).map(|(flavour, _)| flavour), wanted, "{what}");
        }
    }
}
