// SPDX-License-Identifier: Apache-2.0
//! Which of the two carries the rules, when nobody says: what kube-proxy and the node use already. A pure decision over a
//! snapshot.
//!
//! It matters because an accept in one does not undo a drop in the other, and because iptables needs programs.

use std::io;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, info};
use weft_subnet::cidr::Family;

use super::{Choice, other_programs};
use crate::firewall::iptables::{self, Saved};
use crate::firewall::nft;
use crate::firewall::nft::generation::{Known, generation};
use crate::firewall::nft::tables::{Table, read_by, tables};
use weft_netlink::socket::Netlink;

/// kube-proxy's table in its nftables mode.
const KUBE_TABLE: &str = "kube-proxy";
/// Chains of kube-proxy alone: kubelet makes KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT and KUBE-FIREWALL in any mode.
const KUBE_PROXY_CHAINS: [&str; 4] = ["KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-PROXY-CANARY", "KUBE-FORWARD"];

/// A provisional choice is looked at again this often, though no table came or went.
const AGAIN: Duration = Duration::from_secs(60);
/// What was seen longer ago is looked at again: kube-proxy may have come meanwhile.
const FRESH: Duration = Duration::from_secs(10);

/// What carries the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// nftables.
    Nft,
    /// iptables.
    Iptables,
}

/// What kube-proxy uses, by what it left in the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KubeProxy {
    /// Not there, or in a mode that uses neither.
    #[default]
    Unseen,
    /// Its chains of iptables are there.
    Iptables,
    /// Its table of nftables is there; chains of iptables may be left from before.
    Nftables,
}

/// What the node uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Programs of iptables are there, and what they read can be read.
    pub iptables: bool,
    /// The kernel has nftables.
    pub nftables: bool,
    /// What kube-proxy uses.
    pub kube_proxy: KubeProxy,
    /// Rules of iptables in `nat` and `filter`, of anybody but us and flannel.
    pub rules: usize,
    /// FORWARD of iptables drops what nobody accepts: Docker sets that.
    pub forward_drops: bool,
}

impl Snapshot {
    /// Adds what one flavour has in one family.
    fn add(&mut self, saved: &Saved) {
        self.iptables = true;
        let kube_proxy = saved.chains().any(|name| KUBE_PROXY_CHAINS.contains(&name));
        if kube_proxy && self.kube_proxy == KubeProxy::Unseen {
            self.kube_proxy = KubeProxy::Iptables;
        }
        let ours = |name: &str| name.starts_with("WEFT-") || name.starts_with("FLANNEL-");
        self.forward_drops |= saved.forward_drops();
        for table in ["nat", "filter"] {
            for (name, chain) in saved.table(table).into_iter().flatten() {
                let foreign = |rule: &&String| {
                    iptables::target(rule).is_none_or(|target| !ours(&target)) && !other_programs::is_ours(rule)
                };
                if !ours(name) {
                    self.rules += chain.rules.iter().filter(foreign).count();
                }
            }
        }
    }
}

/// Says which, and why. `nftables`: `EnableNFTables` where net-conf has it.
pub fn decide(choice: Choice, nftables: Option<bool>, node: &Snapshot) -> (Mode, &'static str) {
    match (choice, nftables) {
        (Choice::Nft, _) => (Mode::Nft, "--firewall says so"),
        (Choice::Iptables, _) => (Mode::Iptables, "--firewall says so"),
        (Choice::Auto, Some(true)) => (Mode::Nft, "EnableNFTables is true"),
        (Choice::Auto, _) if !node.nftables && node.iptables => (Mode::Iptables, "the kernel lacks nftables"),
        (Choice::Auto, _) if !node.iptables => (Mode::Nft, "no program of iptables is there, or none works"),
        (Choice::Auto, Some(false)) => (Mode::Iptables, "EnableNFTables is false"),
        (Choice::Auto, None) if node.kube_proxy == KubeProxy::Nftables => (Mode::Nft, "kube-proxy uses nftables"),
        (Choice::Auto, None) if node.kube_proxy == KubeProxy::Iptables => (Mode::Iptables, "kube-proxy uses iptables"),
        (Choice::Auto, None) if node.forward_drops => (Mode::Iptables, "FORWARD of iptables drops"),
        (Choice::Auto, None) if node.rules > 0 => (Mode::Iptables, "the node has rules in iptables"),
        (Choice::Auto, None) => (Mode::Nft, "the node has no rules in iptables"),
    }
}

/// A look at the node, begun before anyone knows whether it is needed: asking the programs of iptables takes a quarter of a second,
/// in which a lease can be acquired. Dropped, it ends.
#[derive(Debug)]
pub struct Look(Option<(Instant, JoinHandle<Snapshot>)>);

impl Look {
    /// Begins it, unless it is never needed. Inside a tokio runtime.
    pub fn begin(choice: Choice) -> Look {
        Look((choice == Choice::Auto).then(|| (Instant::now(), tokio::spawn(look()))))
    }

    async fn end(mut self) -> Snapshot {
        if let Some((began, task)) = &mut self.0
            && began.elapsed() < FRESH
            && let Ok(node) = task.await
        {
            return node;
        }
        look().await
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        if let Some((_, task)) = &self.0 {
            task.abort();
        }
    }
}

/// Whether nothing that comes later can say otherwise. At boot the tables are empty: kubelet, kube-proxy and Docker start after us.
fn is_settled(choice: Choice, nftables: Option<bool>, node: &Snapshot) -> bool {
    match (choice, nftables) {
        (Choice::Nft | Choice::Iptables, _) | (Choice::Auto, Some(true)) => true,
        (Choice::Auto, Some(false)) => node.iptables,
        (Choice::Auto, None) => node.kube_proxy != KubeProxy::Unseen,
    }
}

/// The choice for this node. It is provisional until kube-proxy was seen.
#[derive(Debug)]
pub struct Chosen {
    choice: Choice,
    nftables: Option<bool>,
    mode: Mode,
    settled: bool,
}

impl Chosen {
    /// Decides, and says it in the log.
    pub async fn now(choice: Choice, nftables: Option<bool>, look: Look) -> Chosen {
        let looked_at = choice == Choice::Auto && nftables != Some(true);
        let node = if looked_at { look.end().await } else { Snapshot::default() };
        let (mode, why) = decide(choice, nftables, &node);
        say(mode, why);
        Chosen { choice, nftables, mode, settled: is_settled(choice, nftables, &node) }
    }

    /// What carries the rules.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Looks again, until something says otherwise than at the first look. Never ends once the choice is settled.
    pub async fn changed(&mut self, every: Duration) {
        let (mut tables, mut seen, mut next) = (Tables::default(), None, Instant::now());
        while !self.settled {
            tokio::time::sleep(every).await;
            // A look at everything runs programs: only when tables came or went, and now and then.
            let now = tables.names();
            if seen.as_ref() == Some(&now) && Instant::now() < next {
                continue;
            }
            (seen, next) = (Some(now), Instant::now() + AGAIN);
            if self.take(&look().await) {
                return;
            }
        }
        std::future::pending().await
    }

    /// True when the mode is another now. That rules went is no sign.
    fn take(&mut self, node: &Snapshot) -> bool {
        let (mode, why) = decide(self.choice, self.nftables, node);
        self.settled = is_settled(self.choice, self.nftables, node);
        let sign = mode == Mode::Iptables || node.kube_proxy == KubeProxy::Nftables;
        if mode == self.mode || !sign {
            return false;
        }
        self.mode = mode;
        say(mode, why);
        true
    }
}

/// What costs next to nothing to look at: which tables there are, of nftables and of iptables-legacy.
#[derive(Debug, Default)]
struct Tables {
    netlink: Option<Netlink>,
    known: Known<Vec<Table>>,
}

impl Tables {
    fn names(&mut self) -> (Vec<Table>, [String; 2]) {
        (self.of_nftables().unwrap_or_default(), [Family::V4, Family::V6].map(iptables::legacy_tables))
    }

    fn of_nftables(&mut self) -> io::Result<Vec<Table>> {
        let netlink = nft::kept(&mut self.netlink)?;
        let generation = generation(netlink);
        if let Some(tables) = self.known.at(generation) {
            return Ok(tables.clone());
        }
        let tables = read_by(netlink)?;
        self.known.keep(generation, tables.clone());
        Ok(tables)
    }
}

fn say(mode: Mode, why: &str) {
    let name = match mode {
        Mode::Nft => "nftables",
        Mode::Iptables => "iptables",
    };
    info!("traffic rules by {name}: {why}");
}

async fn look() -> Snapshot {
    let mut node = Snapshot::default();
    match tables().await {
        Ok(tables) => {
            node.nftables = true;
            if tables.iter().any(|table| table.name == KUBE_TABLE) {
                node.kube_proxy = KubeProxy::Nftables;
            }
        }
        Err(error) => debug!("tables of nftables cannot be listed: {error}"),
    }
    for flavour in iptables::installed() {
        for family in [Family::V4, Family::V6] {
            match iptables::save(flavour, family).await {
                Ok(saved) => node.add(&saved),
                Err(error) => debug!("{flavour}: {}", error.said()),
            }
        }
    }
    node
}

#[cfg(test)]
mod tests {
    use super::{Chosen, Instant, KubeProxy, Look, Mode, Snapshot, decide, is_settled};
    use crate::firewall::Choice;
    use crate::firewall::iptables::Saved;

    fn node() -> Snapshot {
        Snapshot { iptables: true, nftables: true, ..Snapshot::default() }
    }

    #[test]
    fn the_node_decides_when_nobody_else_does() {
        let (nft, iptables) = (Mode::Nft, Mode::Iptables);
        for (what, node, wanted) in [
            ("nothing there", node(), nft),
            (
                "kube-proxy in nftables mode, kubelet's own rules",
                Snapshot { kube_proxy: KubeProxy::Nftables, rules: 3, ..node() },
                nft,
            ),
            (
                "kube-proxy in iptables mode",
                Snapshot { kube_proxy: KubeProxy::Iptables, rules: 40, ..node() },
                iptables,
            ),
            ("Docker", Snapshot { forward_drops: true, rules: 12, ..node() }, iptables),
            ("a policy and no rule", Snapshot { forward_drops: true, ..node() }, iptables),
            ("some rule", Snapshot { rules: 1, ..node() }, iptables),
            ("no programs", Snapshot { iptables: false, ..node() }, nft),
            ("no nftables in the kernel", Snapshot { nftables: false, ..node() }, iptables),
            ("neither", Snapshot::default(), nft),
        ] {
            assert_eq!(decide(Choice::Auto, None, &node).0, wanted, "{what}");
        }
    }

    #[test]
    fn what_is_said_wins() {
        let kube = Snapshot { kube_proxy: KubeProxy::Nftables, ..node() };
        let chains = Snapshot { kube_proxy: KubeProxy::Iptables, ..node() };
        let bare = Snapshot { nftables: true, ..Snapshot::default() };
        for (what, choice, nftables, node, wanted) in [
            ("flag over net-conf", Choice::Iptables, Some(true), &kube, Mode::Iptables),
            ("flag over the node", Choice::Nft, None, &chains, Mode::Nft),
            ("flag over missing programs", Choice::Iptables, None, &bare, Mode::Iptables),
            ("net-conf over the node", Choice::Auto, Some(true), &chains, Mode::Nft),
            ("net-conf over the node", Choice::Auto, Some(false), &kube, Mode::Iptables),
            ("flannel's manifest says false, no programs", Choice::Auto, Some(false), &bare, Mode::Nft),
        ] {
            assert_eq!(decide(choice, nftables, node).0, wanted, "{what}");
        }
    }

    /// After a reboot the agent is there before everyone else: it ends where a restart of it would.
    #[test]
    fn what_comes_after_us_decides_too() {
        let rules = Snapshot { rules: 1, ..node() };
        let chains = Snapshot { kube_proxy: KubeProxy::Iptables, rules: 40, ..node() };
        let table = Snapshot { kube_proxy: KubeProxy::Nftables, rules: 3, ..node() };
        for (what, steps) in [
            ("kube-proxy in iptables mode", vec![(&chains, Mode::Iptables, true)]),
            ("kubelet, then kube-proxy", vec![(&rules, Mode::Iptables, false), (&chains, Mode::Iptables, true)]),
            (
                "kubelet, then kube-proxy in nftables mode",
                vec![(&rules, Mode::Iptables, false), (&table, Mode::Nft, true)],
            ),
            ("rules that go", vec![(&rules, Mode::Iptables, false), (&node(), Mode::Iptables, false)]),
            ("nothing", vec![(&node(), Mode::Nft, false)]),
        ] {
            let settled = is_settled(Choice::Auto, None, &node());
            let mut chosen = Chosen { choice: Choice::Auto, nftables: None, mode: Mode::Nft, settled };
            assert!(!chosen.settled);
            for (node, mode, settled) in steps {
                let before = chosen.mode;
                assert_eq!(chosen.take(node), mode != before, "{what}");
                assert_eq!((chosen.mode, chosen.settled), (mode, settled), "{what}");
            }
        }
        for (choice, nftables) in [(Choice::Nft, None), (Choice::Iptables, None), (Choice::Auto, Some(true))] {
            assert!(is_settled(choice, nftables, &Snapshot::default()));
        }
        assert!(is_settled(Choice::Auto, Some(false), &node()));
        assert!(!is_settled(Choice::Auto, Some(false), &Snapshot::default()), "no program worked yet");
    }

    /// What was seen while the lease was waited for decides; where it cannot matter, nobody looks, and nobody waits for a look.
    #[tokio::test]
    async fn a_look_that_was_begun_before_is_the_one_that_counts() {
        let docker = Snapshot { forward_drops: true, ..node() };
        let seen = Look(Some((Instant::now(), tokio::spawn(async { docker }))));
        assert_eq!(Chosen::now(Choice::Auto, None, seen).await.mode(), Mode::Iptables);
        let endless = Look(Some((Instant::now(), tokio::spawn(std::future::pending()))));
        assert_eq!(Chosen::now(Choice::Auto, Some(true), endless).await.mode(), Mode::Nft);
        for choice in [Choice::Nft, Choice::Iptables] {
            assert!(Look::begin(choice).0.is_none());
        }
    }

    #[test]
    fn our_own_rules_and_flannels_are_no_sign() {
        let ours = "*nat\n:POSTROUTING ACCEPT [0:0]\n:WEFT-POSTRTG - [0:0]\n:FLANNEL-POSTRTG - [0:0]\n\
                    -A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n\
                    -A POSTROUTING -j WEFT-POSTRTG\n-A WEFT-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\nCOMMIT\n";
        let mut seen = Snapshot { nftables: true, ..Snapshot::default() };
        seen.add(&Saved::parse(ours));
        assert_eq!(seen, node());
        let accept = "-A FORWARD -s 10.5.0.0/16 -m comment --comment \"weft forward\" -j ACCEPT";
        seen.add(&Saved::parse(&format!("*filter\n:FORWARD ACCEPT [0:0]\n{accept}\nCOMMIT\n")));
        assert_eq!(seen, node());
        seen.add(&Saved::parse("*filter\n:FORWARD DROP [0:0]\n-A FORWARD -j DOCKER-USER\nCOMMIT\n"));
        assert_eq!(seen, Snapshot { rules: 1, forward_drops: true, ..node() });
        let services = Saved::parse("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n");
        seen.add(&services);
        assert_eq!(seen.kube_proxy, KubeProxy::Iptables);
        let mut moved = Snapshot { kube_proxy: KubeProxy::Nftables, ..node() };
        moved.add(&services);
        assert_eq!(moved.kube_proxy, KubeProxy::Nftables, "it left chains behind");
        let mut kubelet = node();
        kubelet.add(&Saved::parse("*mangle\n:KUBE-KUBELET-CANARY - [0:0]\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"));
        assert_eq!(kubelet, node(), "kubelet is there in any mode");
    }
}
