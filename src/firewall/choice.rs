// SPDX-License-Identifier: Apache-2.0
//! The choice between nftables and iptables. Where neither a flag nor net-conf decides, the rules go where kube-proxy and the node have
//! theirs, because an accept in nftables does not undo a drop in iptables. The decision is a pure function of a [`Snapshot`].

use std::io;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, info};
use weft_cni::iptables::{Saved, target, words};
use weft_subnet::cidr::Family;

use super::iptables;
use super::iptables_forward;
use super::nft::connection;
use super::nft::generation::{Cached, generation};
use super::nft::tables::{TableName, read_by, tables};
use weft_netlink::socket::Netlink;

/// The table of kube-proxy in its nftables mode.
const KUBE_TABLE: &str = "kube-proxy";
/// Chains that only kube-proxy makes. kubelet makes KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT and KUBE-FIREWALL in any mode.
const KUBE_PROXY_CHAINS: [&str; 4] = ["KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-PROXY-CANARY", "KUBE-FORWARD"];

/// A provisional choice is checked again after this time, even if no table was added or removed.
const CHECK_AGAIN: Duration = Duration::from_secs(60);
/// A survey that is older than this is made again, because kube-proxy may have started in the meantime.
const VALID: Duration = Duration::from_secs(10);

/// Which packet filter gets the traffic rules (`--firewall`). The comments of the values are shown by `--help`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// As EnableNFTables in net-conf says, or else what kube-proxy and this machine use.
    #[default]
    Auto,
    /// nftables, without helper programs.
    Nft,
    /// iptables, by the programs of iptables.
    Iptables,
}

/// The packet filter that the rules are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// nftables.
    Nft,
    /// iptables.
    Iptables,
}

/// What kube-proxy uses, judged by its tables and chains in the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KubeProxy {
    /// kube-proxy does not run here, or runs in a mode that uses neither.
    #[default]
    Unseen,
    /// It has chains in iptables.
    Iptables,
    /// It has a table in nftables. Chains in iptables may be left from an earlier mode.
    Nftables,
}

/// What the node uses at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Programs of iptables are installed, and one of them works.
    pub iptables: bool,
    /// The kernel has nftables.
    pub nftables: bool,
    /// What kube-proxy uses.
    pub kube_proxy: KubeProxy,
    /// The number of rules in `nat` and `filter` of iptables, without those of weft and flannel.
    pub rules: usize,
    /// FORWARD of iptables drops packets that no rule accepts. Docker sets that policy.
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
        self.forward_drops |= iptables::forward_drops(saved);
        for table in ["nat", "filter"] {
            for (name, chain) in saved.table(table).into_iter().flatten() {
                let foreign = |rule: &&String| {
                    let words = words(rule);
                    target(&words).is_none_or(|(target, _)| !ours(target)) && !iptables_forward::is_ours(&words)
                };
                if !ours(name) {
                    self.rules += chain.rules.iter().filter(foreign).count();
                }
            }
        }
    }
}

/// Decides, and says why. `nftables` is `EnableNFTables`, if net-conf has it.
pub fn decide(choice: Choice, nftables: Option<bool>, node: &Snapshot) -> (Mode, &'static str) {
    match (choice, nftables) {
        (Choice::Nft, _) => (Mode::Nft, "--firewall asks for it"),
        (Choice::Iptables, _) => (Mode::Iptables, "--firewall asks for it"),
        (Choice::Auto, Some(true)) => (Mode::Nft, "EnableNFTables is true"),
        (Choice::Auto, _) if !node.nftables && node.iptables => (Mode::Iptables, "the kernel has no nftables"),
        (Choice::Auto, _) if !node.iptables => (Mode::Nft, "no program of iptables is installed, or none works"),
        (Choice::Auto, Some(false)) => (Mode::Iptables, "EnableNFTables is false"),
        (Choice::Auto, None) if node.kube_proxy == KubeProxy::Nftables => (Mode::Nft, "kube-proxy uses nftables"),
        (Choice::Auto, None) if node.kube_proxy == KubeProxy::Iptables => (Mode::Iptables, "kube-proxy uses iptables"),
        (Choice::Auto, None) if node.forward_drops => (Mode::Iptables, "chain FORWARD of iptables drops packets"),
        (Choice::Auto, None) if node.rules > 0 => (Mode::Iptables, "the node has rules in iptables"),
        (Choice::Auto, None) => (Mode::Nft, "the node has no rules in iptables"),
    }
}

/// A snapshot in the making. It is begun before the lease is acquired, because the programs of iptables take a quarter of a second. It
/// ends when it is dropped.
#[derive(Debug)]
pub struct Survey(Option<(Instant, JoinHandle<Snapshot>)>);

impl Survey {
    /// Begins the survey, unless the choice does not depend on it. Must be called inside a tokio runtime.
    pub fn begin(choice: Choice) -> Survey {
        Survey((choice == Choice::Auto).then(|| (Instant::now(), tokio::spawn(survey()))))
    }

    async fn finish(mut self) -> Snapshot {
        if let Some(task) = self.valid()
            && let Ok(node) = task.await
        {
            return node;
        }
        survey().await
    }

    /// Returns the survey that was begun, unless it is too old.
    fn valid(&mut self) -> Option<&mut JoinHandle<Snapshot>> {
        let (began, task) = self.0.as_mut()?;
        (began.elapsed() < VALID).then_some(task)
    }
}

impl Drop for Survey {
    fn drop(&mut self) {
        if let Some((_, task)) = &self.0 {
            task.abort();
        }
    }
}

/// Returns true if no program that starts later can change the decision. At boot the tables are empty, because kubelet, kube-proxy and
/// Docker start after the agent.
fn is_final(choice: Choice, nftables: Option<bool>, node: &Snapshot) -> bool {
    match (choice, nftables) {
        (Choice::Nft | Choice::Iptables, _) | (Choice::Auto, Some(true)) => true,
        (Choice::Auto, Some(false)) => node.iptables,
        (Choice::Auto, None) => node.kube_proxy != KubeProxy::Unseen,
    }
}

/// The decision for this node. It is provisional until kube-proxy was seen.
#[derive(Debug)]
pub struct Chosen {
    choice: Choice,
    nftables: Option<bool>,
    mode: Mode,
    is_final: bool,
}

impl Chosen {
    /// Decides, and logs the decision.
    pub async fn now(choice: Choice, nftables: Option<bool>, survey: Survey) -> Chosen {
        let depends_on_node = choice == Choice::Auto && nftables != Some(true);
        let node = if depends_on_node { survey.finish().await } else { Snapshot::default() };
        let (mode, why) = decide(choice, nftables, &node);
        log(mode, why);
        Chosen { choice, nftables, mode, is_final: is_final(choice, nftables, &node) }
    }

    /// Returns the packet filter that the rules are in.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Waits until the decision changes. Waits forever once the decision is final. Cancel-safe.
    pub async fn changed(&mut self, every: Duration) {
        let (mut tables, mut surveyed) = (Tables::default(), Surveyed::default());
        while !self.is_final {
            tokio::time::sleep(every).await;
            if surveyed.again(tables.names(), Instant::now()) && self.update(&survey().await) {
                return;
            }
        }
        std::future::pending().await
    }

    /// Decides again. Returns true if the mode changed. It does not change to nftables only because rules were removed.
    fn update(&mut self, node: &Snapshot) -> bool {
        let (mode, why) = decide(self.choice, self.nftables, node);
        self.is_final = is_final(self.choice, self.nftables, node);
        let is_reason = mode == Mode::Iptables || node.kube_proxy == KubeProxy::Nftables;
        if mode == self.mode || !is_reason {
            return false;
        }
        self.mode = mode;
        log(mode, why);
        true
    }
}

/// The names of the tables of nftables and of iptables-legacy.
type Names = (Vec<TableName>, [String; 2]);

/// When the last survey was made, and which tables there were. `None` before the first one.
#[derive(Debug, Default)]
struct Surveyed(Option<(Names, Instant)>);

impl Surveyed {
    /// Returns true if it is time for another survey. A survey runs programs, so it is made only when tables were added or removed, and
    /// after a longer time.
    fn again(&mut self, names: Names, now: Instant) -> bool {
        let is_recent = |(then, at): &(Names, Instant)| *then == names && now < *at + CHECK_AGAIN;
        if self.0.as_ref().is_some_and(is_recent) {
            return false;
        }
        self.0 = Some((names, now));
        true
    }
}

/// Reads the names of the tables, which costs almost nothing.
#[derive(Debug, Default)]
struct Tables {
    netlink: Option<Netlink>,
    known: Cached<Vec<TableName>>,
}

impl Tables {
    fn names(&mut self) -> Names {
        (self.of_nftables().unwrap_or_default(), Family::BOTH.map(iptables::legacy_tables))
    }

    fn of_nftables(&mut self) -> io::Result<Vec<TableName>> {
        let netlink = connection::open_once(&mut self.netlink)?;
        let generation = generation(netlink);
        if let Some(tables) = self.known.at(generation) {
            return Ok(tables.clone());
        }
        let tables = read_by(netlink)?;
        self.known.keep(generation, tables.clone());
        Ok(tables)
    }
}

fn log(mode: Mode, why: &str) {
    let name = match mode {
        Mode::Nft => "nftables",
        Mode::Iptables => "iptables",
    };
    info!("the traffic rules are carried by {name}: {why}");
}

async fn survey() -> Snapshot {
    let mut node = Snapshot::default();
    let nftables = tables().await;
    match &nftables {
        Ok(tables) => {
            node.nftables = true;
            if tables.iter().any(|table| table.name == KUBE_TABLE) {
                node.kube_proxy = KubeProxy::Nftables;
            }
        }
        Err(error) => debug!("list the tables of nftables: {error}"),
    }
    for flavour in iptables::installed() {
        for family in Family::BOTH {
            match iptables::save_among(flavour, family, nftables.as_deref().ok()).await {
                Ok(saved) => node.add(&saved),
                Err(error) => debug!("{flavour}: {}", error.stderr()),
            }
        }
    }
    node
}

#[cfg(test)]
mod tests {
    use super::{
        CHECK_AGAIN, Choice, Chosen, Instant, KubeProxy, Mode, Snapshot, Survey, Surveyed, VALID, decide, is_final,
    };
    use weft_cni::iptables::Saved;

    fn node() -> Snapshot {
        Snapshot { iptables: true, nftables: true, ..Snapshot::default() }
    }

    #[test]
    fn the_node_decides_when_no_flag_does() {
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
    fn flags_and_net_conf_win_over_the_node() {
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

    /// After a reboot the agent starts before the other programs. It decides in the end as it would after a restart.
    #[test]
    fn programs_that_start_later_change_the_decision() {
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
            let before = is_final(Choice::Auto, None, &node());
            let mut chosen = Chosen { choice: Choice::Auto, nftables: None, mode: Mode::Nft, is_final: before };
            assert!(!chosen.is_final);
            for (node, mode, is_final) in steps {
                let before = chosen.mode;
                assert_eq!(chosen.update(node), mode != before, "{what}");
                assert_eq!((chosen.mode, chosen.is_final), (mode, is_final), "{what}");
            }
        }
        for (choice, nftables) in [(Choice::Nft, None), (Choice::Iptables, None), (Choice::Auto, Some(true))] {
            assert!(is_final(choice, nftables, &Snapshot::default()));
        }
        assert!(is_final(Choice::Auto, Some(false), &node()));
        assert!(!is_final(Choice::Auto, Some(false), &Snapshot::default()), "no program worked yet");
    }

    /// The survey that was begun earlier decides. Where the decision does not depend on it, none is begun and none is waited for.
    #[tokio::test]
    async fn the_survey_that_was_begun_earlier_decides() {
        let docker = Snapshot { forward_drops: true, ..node() };
        let seen = Survey(Some((Instant::now(), tokio::spawn(async { docker }))));
        assert_eq!(Chosen::now(Choice::Auto, None, seen).await.mode(), Mode::Iptables);
        let endless = Survey(Some((Instant::now(), tokio::spawn(std::future::pending()))));
        assert_eq!(Chosen::now(Choice::Auto, Some(true), endless).await.mode(), Mode::Nft);
        for choice in [Choice::Nft, Choice::Iptables] {
            assert!(Survey::begin(choice).0.is_none());
        }
    }

    /// The agent waits for its lease as long as the store is away, and kube-proxy may start meanwhile.
    #[tokio::test(start_paused = true)]
    async fn an_old_survey_does_not_decide() {
        let mut survey = Survey(Some((Instant::now(), tokio::spawn(std::future::pending()))));
        assert!(survey.valid().is_some());
        tokio::time::advance(VALID).await;
        assert!(survey.valid().is_none());
    }

    /// Docker sets the policy of a table that is there already.
    #[test]
    fn a_survey_is_made_again_when_tables_change_and_after_some_time() {
        let names = |legacy: &str| (Vec::new(), [legacy.to_owned(), String::new()]);
        let (mut surveyed, now) = (Surveyed::default(), Instant::now());
        let almost = now + CHECK_AGAIN - std::time::Duration::from_millis(1);
        assert!(surveyed.again(names("filter"), now), "the first one");
        assert!(!surveyed.again(names("filter"), almost));
        assert!(surveyed.again(names("filter\nnat"), almost), "another table");
        assert!(!surveyed.again(names("filter\nnat"), now + CHECK_AGAIN));
        assert!(surveyed.again(names("filter\nnat"), almost + CHECK_AGAIN), "it is long ago");
    }

    #[test]
    fn rules_of_weft_and_flannel_do_not_decide() {
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
