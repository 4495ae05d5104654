// SPDX-License-Identifier: Apache-2.0
//! A start from saved leases, while the store is away. They are used only for the same network and the same addresses of this node, and
//! only for a limited time. Later another node may have our subnet, or that of a peer.

use std::cell::OnceCell;

use weft_backends::backend::{Backend, Skip};
use weft_backends::host::Host;
use weft_backends::register::TYPES;
use weft_backends::state::Name;
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::PublicPorts;
use weft_subnet::cidr::{Subnets, family};
use weft_subnet::evidence::Public;
use weft_subnet::net_conf::NetConf;
use weft_subnet::old_defects::{Defect, is_back};
use weft_subnet::outside::wall_clock;
use weft_subnet::saved_peers::{ClearText, Expiry, Head, Saved};
use weft_subnet::source::Capabilities;

use super::{
    Kept, Leased, StartContext, Started, candidates, earlier_backends, host, identities, ports, read_subnet_file,
    with_chosen,
};
use crate::extension::FirstError;
use crate::kernel::{Kernel, Machine, MachineError};
use crate::log::chain;
use crate::log::text::date;
use crate::options::UplinkChoice;
use crate::plan::{ConfError, ExtraBackend, ParsedConf};
use crate::saved::SavedFile;
use crate::uplink::{self, EarlierUse, PickError, Picked, UsedUplink};

/// For so many seconds after the last answer of the store, its leases are believed. This is the lifetime of a lease in etcd, after which
/// a peer that was silent has lost its subnet. In Kubernetes no lease expires, but a Node that is gone for a day may be deleted, and
/// another Node may get its pod CIDR.
const MAX_AGE: u64 = 24 * 3600;
/// The largest expected difference between the clocks of one machine before and after a boot, in seconds. A lease counts as expired so
/// much earlier.
const SLACK: u64 = 60;

/// What an earlier run saved. It is read when it is first needed.
#[derive(Debug, Default)]
pub struct EarlierRun {
    saved_file: Option<SavedFile>,
    saved: Option<Saved>,
    /// Everything but the peers, after the file was searched.
    head: OnceCell<Option<Head>>,
    /// Why it cannot be used, if that was logged.
    logged: Option<String>,
}

impl EarlierRun {
    /// Returns the content of this file.
    pub fn new(saved_file: Option<SavedFile>) -> EarlierRun {
        EarlierRun { saved_file, ..EarlierRun::default() }
    }

    /// Returns the subnet that this node had when it had these addresses in this network. A start needs it when a boot has removed
    /// subnet.env. Its age does not matter, because the store shows whether the lease is ours. It is not needed where subnets are
    /// assigned.
    pub(super) fn subnet(&mut self, public: Public, net_conf: &NetConf, store: Capabilities) -> Option<Subnets> {
        if store.assigned {
            return None;
        }
        let head = self.head()?;
        let same = NetConf::parse(&head.config).is_ok_and(|then| then.networks == net_conf.networks);
        (same && head.public == public).then_some(head.own.subnets)
    }

    /// Returns the UDP ports that our saved lease names, if it names any. A device may have kept a port that is not that of net-conf, and
    /// after a boot there is no device that shows it.
    pub(super) fn ports(&mut self) -> Option<PublicPorts> {
        let ports = (TYPES.ports)(&self.head()?.own.attrs);
        ports.iter().any(Option::is_some).then_some(ports)
    }

    /// Returns the uplink that this node had, for a choice with these flags. Its age does not matter, because it is used only if the
    /// machine still has it.
    pub(super) fn uplink(&mut self, choice: &UplinkChoice) -> EarlierUse {
        match self.head() {
            Some(head) => before(head, choice),
            // Nobody knows with which flags the address in the lease was chosen. So the lease alone decides only a choice without flags.
            None => EarlierUse { same_flags: uplink::flags(choice).is_empty(), ..EarlierUse::default() },
        }
    }

    /// Returns the net-confs of the earlier run with which a start may have to begin, before it changes to this one. Our lease in the store
    /// decides ([`Before::fits`]).
    pub(super) fn before(&mut self, conf: &ParsedConf) -> Vec<Before> {
        let asked = self.in_force(conf).map(|conf| Before { conf, is_saved: false });
        let saved = self.other_backend(conf).map(|conf| Before { conf, is_saved: true });
        asked.into_iter().chain(saved).collect()
    }

    /// Returns the net-conf that was in force, if `conf` is another one and our saved lease does not show which of the two our lease is of.
    /// Either the store had not answered when the earlier run asked for a lease with it, or an option of the backend was changing.
    fn in_force(&mut self, conf: &ParsedConf) -> Option<ParsedConf> {
        let head = self.head()?;
        let then = of_network(head, conf, &head.config).filter(|then| then.text != conf.text)?;
        let names = |backend: &dyn Backend| backend.understands(&head.own.attrs);
        let is_same_type = |text: &String| {
            of_network(head, conf, text).is_some_and(|other| other.backend.kind() == then.backend.kind())
        };
        let changes_option = names(&*conf.backend) && head.earlier.iter().any(is_same_type);
        (!names(&*then.backend) || changes_option).then_some(then)
    }

    /// Returns the net-conf of our saved lease, if the backend of this one does not understand that lease. Both must be of the
    /// network in which our lease is. If the store had not accepted our lease with the backend that was in force, this is an
    /// earlier net-conf.
    pub(super) fn other_backend(&mut self, conf: &ParsedConf) -> Option<ParsedConf> {
        let head = self.head()?;
        if conf.backend.understands(&head.own.attrs) {
            return None;
        }
        let read =
            |text: &String| of_network(head, conf, text).filter(|then| then.backend.understands(&head.own.attrs));
        std::iter::once(&head.config).chain(&head.earlier).find_map(read)
    }

    /// Returns the net-confs by whose backends peers reach this node, too, in the order in which packets preferred them. Our lease names them
    /// as other ways.
    pub(super) fn earlier(&mut self, net_conf: &NetConf, lease: &Attrs) -> Vec<ParsedConf> {
        let Some(head) = self.head() else { return Vec::new() };
        let ways = lease.other_ways();
        let read = |text: &String| {
            let then = ParsedConf::parse(text).ok()?;
            let is_named = ways.iter().any(|way| then.backend.understands(way)) && then.backend.commands().is_none();
            (is_named && are_of_one_network(&then.net_conf, net_conf, &head.own.subnets)).then_some(then)
        };
        preferred(head).into_iter().filter_map(read).collect()
    }

    /// Returns true if packets went by one of these earlier backends to peers that know it, and not by the backend of this net-conf, because peers
    /// had not had the time yet to learn that our lease names it. A restart gives them no time.
    pub(super) fn sent_earlier(&mut self, conf: &ParsedConf, earlier: &[ExtraBackend]) -> bool {
        let Some(head) = self.head() else { return false };
        let order = preferred(head);
        let place = |text: &str| order.iter().position(|other| *other == text);
        match place(&conf.text) {
            Some(at) => earlier.iter().any(|extra| place(extra.text()).is_some_and(|other| other < at)),
            // Somebody has edited net-conf since, or the file is older than our lease, if its lease is of another backend.
            None => head.sends_earlier || !conf.backend.understands(&head.own.attrs),
        }
    }

    /// Returns since when, and to which leases, packets could go in clear text although the backend of our lease encrypts.
    pub(super) fn clear_text(&mut self) -> Option<ClearText> {
        self.head()?.clear_text.clone()
    }

    /// Returns everything but the peers.
    fn head(&mut self) -> Option<&Head> {
        // An attempt to start without the store has read everything, and has taken the file.
        let (saved_file, saved) = (self.saved_file.as_ref(), self.saved.as_ref());
        let read = || saved.map(|saved| saved.head.clone()).or_else(|| saved_file.and_then(SavedFile::read_head));
        self.head.get_or_init(read).as_ref()
    }

    fn read_saved(&mut self) -> Option<&Saved> {
        if let Some(saved_file) = self.saved_file.take() {
            match saved_file.read() {
                Ok(saved) => self.saved = saved,
                Err(reason) => tracing::info!("{reason}: not used"),
            }
        }
        self.saved.as_ref()
    }

    /// Logs the reason once, until it changes.
    pub(super) fn log_unusable(&mut self, reason: String) {
        if self.logged.as_ref() != Some(&reason) {
            tracing::info!("saved peers: {reason}: not used");
            self.logged = Some(reason);
        }
    }
}

/// A net-conf of the earlier run with which a start may have to begin.
pub(super) struct Before {
    pub(super) conf: ParsedConf,
    /// Our saved lease is of its backend.
    is_saved: bool,
}

impl Before {
    /// Returns true if a start begins with this net-conf, because peers reach this node as our lease in the store says, and the `next`
    /// backend cannot follow without a change of that lease.
    pub(super) fn fits(&self, next: &dyn Backend, lease: &Attrs) -> bool {
        if self.is_saved {
            return !next.understands(lease);
        }
        // While an option changes, another one waits until that has ended. A start must not hurry it.
        let changes_option = || lease.other_ways().iter().any(|way| way.backend_type == lease.backend_type);
        self.conf.backend.understands(lease) && (!next.understands(lease) || changes_option())
    }
}

/// Returns a net-conf of the earlier run, if it is of the network of this one, and neither has commands. What only a start can change is as
/// in this one, because this is a start.
fn of_network(head: &Head, conf: &ParsedConf, text: &str) -> Option<ParsedConf> {
    let mut then = ParsedConf::parse(text).ok()?;
    let has_commands = conf.backend.commands().is_some() || then.backend.commands().is_some();
    let is_one = are_of_one_network(&then.net_conf, &conf.net_conf, &head.own.subnets);
    then.net_conf.nftables = conf.net_conf.nftables;
    (is_one && !has_commands).then_some(then)
}

/// Returns the net-confs of an earlier run in the order in which packets preferred their backends.
fn preferred(head: &Head) -> Vec<&String> {
    let (config, earlier) = (std::iter::once(&head.config), head.earlier.iter());
    if head.sends_earlier { earlier.chain(config).collect() } else { config.chain(earlier).collect() }
}

/// Returns true if both net-confs enable the same families, and contain our subnets. Network may have become wider or narrower while the
/// backend changed.
fn are_of_one_network(one: &NetConf, other: &NetConf, own: &Subnets) -> bool {
    let families = |net_conf: &NetConf| (net_conf.networks.v4.is_some(), net_conf.networks.v6.is_some());
    let contains = |net_conf: &NetConf| {
        let mut subnets = own.in_families_of(&net_conf.networks).iter();
        subnets.all(|net| net_conf.networks.of(family(&net)).is_some_and(|all| all.contains(&net)))
    };
    families(one) == families(other) && contains(one) && contains(other)
}

/// Returns the saved uplink. A file of an older weft contains only its published addresses, which count as chosen without flags.
fn before(head: &Head, choice: &UplinkChoice) -> EarlierUse {
    let now = uplink::flags(choice);
    let (name, ips, flags) = match &head.uplink {
        Some(used) => (Name::new(&used.name), (used.v4, used.v6), used.flags.as_str()),
        None => (None, head.public, ""),
    };
    EarlierUse { same_flags: now == flags, saved: Some(UsedUplink { name, ips }), published: None }
}

/// Runs the command before the lease, if the backend of net-conf has one. `config` is net-conf, if it could be read.
///
/// # Errors
/// The command failed, or is not allowed.
pub(super) async fn run_first_command<K: Kernel>(
    context: &mut StartContext<'_, K>,
    config: Option<&str>,
) -> Result<(), FirstError> {
    let Some(saved) = context.memory.read_saved() else { return Ok(()) };
    let Ok(conf) = ParsedConf::parse(config.unwrap_or(&saved.head.config)) else { return Ok(()) };
    context.first_command.run(&*conf.backend).await
}

/// Returns what to continue from with the saved lease and peers. `config` is net-conf, if it could be read.
pub(super) fn from_saved<K: Kernel>(context: &mut StartContext<'_, K>, config: Option<&str>) -> Option<Started> {
    let head = context.memory.read_saved()?.head.clone();
    match fit(context, config, head) {
        Ok(started) => Some(Started { saved: context.memory.saved.take(), ..started }),
        Err(reason) => {
            context.memory.log_unusable(reason.to_string());
            None
        }
    }
}

/// Why what was saved is not used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("they were saved on {saved}, but the clock says {now}: their age cannot be known", saved = date(*saved), now = date(*now))]
    FromTheFuture { saved: u64, now: u64 },
    #[error("the store was last heard on {}, more than {} h ago", date(*.0), MAX_AGE / 3600)]
    Old(u64),
    #[error("our lease of {own} ended on {}, and another node may have that subnet", date(*end))]
    Ended { own: Subnets, end: u64 },
    #[error("an older weft saved them, which did not write down when our lease of {0} ends")]
    NoEnd(Subnets),
    #[error(transparent)]
    NetConf(#[from] ConfError),
    #[error("they are of {} with {}, net-conf says {} with {}", then.networks, then.backend_type, now.networks, now.backend_type)]
    AnotherNetwork { then: Box<NetConf>, now: Box<NetConf> },
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error("{}", chain(.0))]
    Uplink(#[from] PickError),
    #[error("this node had other addresses then, not those of {0}")]
    OtherAddresses(Name),
    #[error(transparent)]
    Identity(#[from] Skip),
}

/// Checks whether the saved leases may still be valid. `expires` is true if the leases of the store expire.
fn fresh(head: &Head, expires: bool, now: u64) -> Result<(), Unusable> {
    let own = head.own.subnets;
    if now + SLACK < head.saved {
        return Err(Unusable::FromTheFuture { saved: head.saved, now });
    }
    if head.saved + MAX_AGE < now {
        return Err(Unusable::Old(head.saved));
    }
    match head.expires {
        _ if is_back(Defect::EndedLeasesUsed) => Ok(()),
        Expiry::At(end) if expires && end <= now + SLACK => Err(Unusable::Ended { own, end }),
        Expiry::Unknown if expires => Err(Unusable::NoEnd(own)),
        _ => Ok(()),
    }
}

/// Returns what to continue from, without the peers, if the file describes this node as it is now.
fn fit<K: Kernel>(context: &mut StartContext<'_, K>, config: Option<&str>, head: Head) -> Result<Started, Unusable> {
    let now = wall_clock().as_secs();
    fresh(&head, context.store.capabilities().expires, now)?;
    let conf = ParsedConf::parse(config.unwrap_or(&head.config))?;
    let (then, now) = (NetConf::parse(&head.config).map_err(ConfError::from)?, &conf.net_conf);
    if (then.networks, &then.backend_type) != (now.networks, &now.backend_type) {
        return Err(Unusable::AnotherNetwork { then: Box::new(then), now: Box::new(now.clone()) });
    }
    let choice = with_chosen(context.choice, head.chosen);
    let machine = context.kernel.machine_towards(choice.can_reach).map_err(MachineError)?;
    let candidates = candidates(&machine, &conf.net_conf, head.own.subnets).after(before(&head, &choice));
    let picked = uplink::pick(&choice, &candidates)?;
    if (picked.public_v4, picked.public_v6) != head.public {
        return Err(Unusable::OtherAddresses(picked.uplink.name));
    }
    let (author, _) = read_subnet_file(context.subnet_file, &conf.net_conf);
    let own = head.own;
    let of_lease = context.memory.other_backend(&conf);
    let host_of = |conf: &ParsedConf| host_of(context, &picked, &machine, conf, &own.attrs);
    let Beside { conf, host, mut earlier } = beside_that_of_lease(conf, of_lease, host_of)?;
    let kept_ports = ports::kept_ports(context.kernel, &machine, &*conf.backend, &host);
    let host = Host { kept_ports, ..host };
    earlier.extend(earlier_backends(context, &machine, &conf, &host, &own.attrs)?);
    let host = ports::with_those_of(context.kernel, &machine, host, &earlier);
    let leased = Leased { host, own, was: None, uplink: choice, chosen: head.chosen };
    let sends_earlier = context.memory.sent_earlier(&conf, &earlier);
    Ok(Started { earlier, sends_earlier, clear_text: head.clear_text, ..Started::new(conf, author, leased) })
}

/// The net-conf with which the node goes on.
struct Beside {
    conf: ParsedConf,
    /// The facts of the host for its backend.
    host: Host,
    /// The backend of the saved lease, if that is another one.
    earlier: Vec<ExtraBackend>,
}

/// Returns the net-conf with which the node goes on: this one, beside that of the saved lease if it has another backend (`of_lease`), or that of
/// the lease alone. `host_of` returns the facts of the host for a net-conf.
///
/// The earlier run may have ended before the store had accepted our lease with the backend of net-conf, or before the answer arrived. So peers
/// may send by either backend, and both must stand. Packets go the way of the saved lease until the store answers.
fn beside_that_of_lease(
    conf: ParsedConf,
    of_lease: Option<ParsedConf>,
    host_of: impl Fn(&ParsedConf) -> Result<Host, Skip>,
) -> Result<Beside, Skip> {
    let host = host_of(&conf);
    let Some(before) = of_lease else { return Ok(Beside { conf, host: host?, earlier: Vec::new() }) };
    let host_before = host_of(&before)?;
    match host.and_then(|host| conf.backend.advertise(&host).map(|_| host)) {
        Ok(host) => Ok(Beside { conf, host, earlier: vec![ExtraBackend::new(before, host_before)] }),
        Err(reason) => {
            let (next, old) = (conf.backend.kind(), before.backend.kind());
            tracing::warn!(
                "net-conf: the backend {next} cannot work on this node: {reason}. The node stays on {old}, and tries again"
            );
            Ok(Beside { conf: before, host: host_before, earlier: Vec::new() })
        }
    }
}

/// Returns the facts of the host with the identities of the backend of this net-conf. `lease` is what our saved lease says.
fn host_of<K: Kernel>(
    context: &StartContext<'_, K>,
    picked: &Picked,
    machine: &Machine,
    conf: &ParsedConf,
    lease: &Attrs,
) -> Result<Host, Skip> {
    let kept = Kept { secrets: &context.secrets, printed: context.first_command.printed() };
    let way = lease.other_ways().into_iter().find(|way| conf.backend.understands(way));
    let identities = identities::chosen(&*conf.backend, machine, kept, Some(way.as_ref().unwrap_or(lease)))?;
    Ok(host(picked, machine, &conf.net_conf, identities))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weft_backends::register::TYPES;
    use weft_subnet::attrs::Attrs;
    use weft_subnet::dir::DirStore;
    use weft_subnet::lease::{Age, Lease};
    use weft_subnet::source::Error;

    use super::super::resume_after;
    use super::super::waiting::StartError;
    use super::*;
    use crate::extension::FirstCommand;
    use crate::kernel::fake::FakeKernel;
    use crate::kernel::fake::tests::machine;
    use crate::lease::acquire::SecretFiles;
    use crate::plan::Plan;

    const DAY: u64 = 24 * 3600;
    const SAVED: u64 = 20_000 * DAY;

    fn head(expires: Expiry) -> Head {
        let subnets = Subnets::from_key("10.5.1.0-24").unwrap();
        let own = Lease { id: "x".into(), subnets, attrs: Attrs::default(), age: Age::default() };
        let (config, public, chosen) = (String::new(), (None, None), [None, None]);
        Head {
            store: String::new(),
            saved: SAVED,
            expires,
            config,
            own,
            public,
            chosen,
            uplink: None,
            earlier: Vec::new(),
            sends_earlier: false,
            clear_text: None,
        }
    }

    #[test]
    fn what_was_saved_counts_for_a_time() {
        let ends = Expiry::At(SAVED + DAY / 2);
        // When our lease expires, whether leases of this store expire, the time now, and the expected reason.
        let table = [
            (ends, true, SAVED, None),
            (ends, true, SAVED + DAY / 2 - 61, None),
            (ends, true, SAVED + DAY / 2 - 60, Some("our lease of 10.5.1.0/24 ended on 2024-10-04 12:00 UTC")),
            (ends, true, SAVED + DAY / 2, Some("ended on")),
            (ends, true, SAVED + DAY + 1, Some("more than 24 h ago")),
            (Expiry::Never, true, SAVED + DAY, None),
            (Expiry::Never, true, SAVED + DAY + 1, Some("the store was last heard on 2024-10-04 00:00 UTC")),
            (Expiry::Unknown, true, SAVED + 1, Some("an older weft saved them")),
            (Expiry::Unknown, false, SAVED + 1, None),
            (Expiry::Never, false, SAVED + DAY, None),
            (Expiry::Never, false, SAVED + DAY + 1, Some("more than 24 h ago")),
            // The clock was set back, or has not been set since the boot.
            (ends, true, SAVED - 60, None),
            (ends, true, SAVED - 61, Some("their age cannot be known")),
            (Expiry::Never, false, 0, Some("but the clock says 1970-01-01 00:00 UTC")),
        ];
        for (expires, of_store, now, wanted) in table {
            let got = fresh(&head(expires), of_store, now).map_err(|unusable| unusable.to_string());
            match wanted {
                None => assert_eq!(got, Ok(()), "{expires:?} {of_store} {now}"),
                Some(words) => assert!(got.as_ref().is_err_and(|text| text.contains(words)), "{now}: {got:?}"),
            }
        }
    }
    const CONFIG: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;

    /// Returns what a node with 192.168.0.1 saved a moment ago.
    fn just_now() -> Head {
        let saved = wall_clock().as_secs();
        let public = ("192.168.0.1".parse().ok(), None);
        Head { saved, config: CONFIG.into(), public, ..head(Expiry::Never) }
    }

    fn fits(addrs: &[&str], config: Option<&str>, head: Head) -> Result<Started, Unusable> {
        on_a_machine(addrs, head.clone(), |context| fit(context, config, head))
    }

    /// Returns what becomes of a start on a machine with these addresses, where this was saved.
    fn on_a_machine<T>(addrs: &[&str], head: Head, run: impl FnOnce(&mut StartContext<'_, FakeKernel>) -> T) -> T {
        let dir = tempfile::tempdir().unwrap();
        let (store, mut kernel) = (DirStore::new(dir.path().into(), TYPES), FakeKernel::new(machine(addrs), 90));
        let (choice, secrets) = (UplinkChoice::default(), SecretFiles::default());
        let saved = Some(Saved { head, peers: Vec::new() });
        let memory = EarlierRun { saved, ..EarlierRun::default() };
        let subnet_file = Path::new("/nonexistent/subnet.env");
        let mut context = StartContext {
            store: &store,
            kernel: &mut kernel,
            choice: &choice,
            subnet_file,
            guard: false,
            memory,
            secrets,
            first_command: FirstCommand::default(),
        };
        run(&mut context)
    }

    /// A store that answers knows better than what was saved, and another node may have our subnet by now.
    #[test]
    fn only_a_store_that_is_away_is_replaced_by_what_was_saved() {
        let resumed = |error: Error| {
            let error = StartError::store("lease: ", Some(CONFIG))(error);
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let start = |context: &mut StartContext<'_, FakeKernel>| runtime.block_on(resume_after(context, error));
            on_a_machine(&["192.168.0.1/24"], just_now(), start).is_ok_and(|started| started.saved.is_some())
        };
        assert!(resumed(Error::Unavailable { what: "acquire".into(), source: Some("connection refused".into()) }));
        assert!(!resumed(Error::Unavailable { what: "acquire: no pod CIDR yet".into(), source: None }));
        assert!(!resumed(Error::Refused { what: "acquire".into(), source: "no rights".into() }));
        assert!(!resumed(Error::OutOfSubnets { min: String::new(), max: String::new() }));
    }

    /// Without the output of the command, the node would publish nothing by which peers reach it. net-conf decides, if it could be read.
    #[test]
    fn a_start_without_the_store_runs_the_command_before_the_lease_too() {
        let extension = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"extension","PreStartupCommand":"true"}}"#;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // The net-conf in the file and that of the store, and whether a command is to run. This agent may run no command.
        for (saved, read, runs) in [
            (extension, None, true),
            (CONFIG, Some(extension), true),
            (extension, Some(CONFIG), false),
            (CONFIG, None, false),
        ] {
            let away = Error::Unavailable { what: "acquire".into(), source: Some("connection refused".into()) };
            let error = StartError::store("lease: ", read)(away);
            let head = Head { config: saved.into(), ..just_now() };
            let start = |context: &mut StartContext<'_, FakeKernel>| runtime.block_on(resume_after(context, error));
            let started = on_a_machine(&["192.168.0.1/24"], head, start);
            let is_refused = matches!(started, Err(StartError::FirstCommand(FirstError::NotAllowed)));
            assert_eq!(is_refused, runs, "saved {saved}, read {read:?}");
        }
    }

    #[test]
    fn what_was_saved_counts_for_this_node_and_network_alone() {
        let ours: &[&str] = &["192.168.0.1/24"];
        let started = fits(ours, None, just_now()).map_err(drop).unwrap();
        assert_eq!((started.own, started.config.as_str()), (just_now().own, CONFIG));
        // A second address of the uplink, which would be preferred otherwise, changes nothing.
        let started = fits(&["192.168.0.9/24", "192.168.0.1/24"], None, just_now()).map_err(drop).unwrap();
        assert_eq!(started.host.public_v4, "192.168.0.1".parse().ok());
        let other_network = CONFIG.replace("10.5.", "10.6.");
        let other_type = CONFIG.replace("host-gw", "vxlan");
        let small = CONFIG.replacen('{', r#"{"SubnetMax":"10.5.99.0","#, 1);
        let table: [(&[&str], Option<&str>, Option<&str>); 5] = [
            (&["192.168.0.2/24"], None, Some("this node had other addresses then")),
            (ours, Some(&other_network), Some("they are of 10.5.0.0/16 with host-gw, net-conf says 10.6.0.0/16")),
            (ours, Some(&other_type), Some("net-conf says 10.5.0.0/16 with vxlan")),
            (ours, Some("{"), Some("net-conf")),
            (ours, Some(&small), None),
        ];
        for (addrs, config, wanted) in table {
            let got = fits(addrs, config, just_now()).map(|started| started.config).map_err(|error| error.to_string());
            match wanted {
                None => assert_eq!(got.as_deref(), Ok(config.unwrap())),
                Some(words) => assert!(got.as_ref().is_err_and(|said| said.contains(words)), "{words}: {got:?}"),
            }
        }
    }

    /// Peers that have not followed a change reach this node by the earlier backend, so a start without the store must keep it.
    #[test]
    fn a_change_of_the_backend_goes_on_without_the_store() {
        let (ours, ipip): (&[&str], _) = (&["192.168.0.1/24"], CONFIG.replace("host-gw", "ipip"));
        let way = |kind: &str| Attrs { backend_type: kind.into(), ..Attrs::default() };
        let head = |config: &str, earlier: &str, attrs| {
            let own = Lease { attrs, ..just_now().own };
            let clear_text = Some(ClearText { since: 1, leases: vec!["10.5.2.0-24".into()], followed: Vec::new() });
            Head { config: config.into(), earlier: vec![earlier.into()], own, clear_text, ..just_now() }
        };
        let started = |head| {
            let started = fits(ours, None, head).map_err(drop).unwrap();
            let earlier: Vec<_> = started.earlier.iter().map(ExtraBackend::kind).collect();
            (
                started.backend.kind(),
                started.config,
                earlier,
                started.wanted,
                started.clear_text.map(|saved| saved.since),
            )
        };
        let both = way("ipip").with_other_ways(&[way("host-gw")]);
        let got = started(head(&ipip, CONFIG, both.clone()));
        assert_eq!(got, ("ipip", ipip.clone(), vec!["host-gw"], None, Some(1)));
        // The lease says that no peer needs the earlier backend.
        assert_eq!(started(head(&ipip, CONFIG, way("ipip"))).2, [""; 0]);
        // Network became wider after the backend had changed. A net-conf that does not contain our subnet is of another network.
        let narrower = |network: &str| CONFIG.replace("10.5.0.0/16", network);
        assert_eq!(started(head(&ipip, &narrower("10.5.0.0/17"), both.clone())).2, ["host-gw"]);
        assert_eq!(started(head(&ipip, &narrower("10.5.128.0/17"), both.clone())).2, [""; 0]);
        // The store may not have accepted the lease with the new backend. Both stand, and the lease decides by which of them packets go.
        let got = started(head(&ipip, CONFIG, way("host-gw")));
        assert_eq!(got, ("ipip", ipip.clone(), vec!["host-gw"], None, Some(1)));
        // The saved lease names an even earlier backend, too.
        let vxlan = CONFIG.replace("host-gw", "vxlan");
        let lease = way("host-gw").with_other_ways(&[way("vxlan")]);
        let both_confs = Head { earlier: vec![CONFIG.into(), vxlan], ..head(&ipip, CONFIG, lease) };
        assert_eq!(started(both_confs).2, ["host-gw", "vxlan"]);
        // Here the new backend cannot work, because peers would use the published address as their gateway.
        let chosen = "203.0.113.9".parse::<std::net::Ipv4Addr>().unwrap();
        let behind_nat = Head {
            chosen: [Some(chosen.into()), None],
            public: (Some(chosen), None),
            ..head(CONFIG, &ipip, way("ipip"))
        };
        assert_eq!(started(behind_nat), ("ipip", ipip.clone(), Vec::new(), None, Some(1)));
    }

    /// Packets go the way that they went, until peers had the time to learn of our lease.
    #[test]
    fn a_restart_within_seconds_of_a_change_goes_on_with_the_earlier_backend() {
        let (ipip, vxlan) = (CONFIG.replace("host-gw", "ipip"), CONFIG.replace("host-gw", "vxlan"));
        let way = |kind: &str| Attrs { backend_type: kind.into(), ..Attrs::default() };
        let goes_on = |config: &str, earlier: &[&String], sends_earlier: bool, attrs: Attrs| {
            let own = Lease { attrs, ..just_now().own };
            let earlier = earlier.iter().map(|text| (*text).clone()).collect();
            let head = Head { config: config.into(), earlier, sends_earlier, own, ..just_now() };
            let started = fits(&["192.168.0.1/24"], None, head).map_err(drop).unwrap();
            let earlier: Vec<_> = started.earlier.iter().map(ExtraBackend::kind).collect();
            (started.backend.kind(), earlier, started.sends_earlier)
        };
        let (host_gw, both) = (CONFIG.to_owned(), way("ipip").with_other_ways(&[way("host-gw")]));
        assert_eq!(goes_on(&ipip, &[&host_gw], true, both.clone()), ("ipip", vec!["host-gw"], true));
        assert_eq!(goes_on(&ipip, &[&host_gw], false, both), ("ipip", vec!["host-gw"], false));
        // The second of two changes.
        let all = way("vxlan").with_other_ways(&[way("ipip"), way("host-gw")]);
        assert_eq!(goes_on(&vxlan, &[&host_gw, &ipip], true, all), ("vxlan", vec!["host-gw", "ipip"], true));
    }

    /// Somebody has edited an option in net-conf since.
    #[test]
    fn another_option_does_not_cut_the_seconds_short_in_which_peers_learn_of_our_lease() {
        let ipip = CONFIG.replace("host-gw", "ipip");
        let way = |kind: &str| Attrs { backend_type: kind.into(), ..Attrs::default() };
        let own = Lease { attrs: way("ipip").with_other_ways(&[way("host-gw")]), ..just_now().own };
        let edited = ipip.replace(r#""ipip""#, r#""ipip","DirectRouting":true"#);
        for sends_earlier in [true, false] {
            let (config, earlier, own) = (ipip.clone(), vec![CONFIG.to_owned()], own.clone());
            let head = Head { config, earlier, sends_earlier, own, ..just_now() };
            let started = fits(&["192.168.0.1/24"], Some(&edited), head).map_err(drop).unwrap();
            assert_eq!((started.config, started.sends_earlier), (edited.clone(), sends_earlier));
        }
    }

    /// The agent asks for a restart when `EnableNFTables` changes. The restart must not ask for another one because the backend changes,
    /// too (`node::tests::config`).
    #[test]
    fn a_start_begins_with_the_backend_of_our_lease_and_with_what_only_a_start_can_apply() {
        let attrs = Attrs { backend_type: "host-gw".into(), ..Attrs::default() };
        let head = Head { own: Lease { attrs, ..just_now().own }, ..just_now() };
        let mut memory = EarlierRun { saved: Some(Saved { head, peers: Vec::new() }), ..EarlierRun::default() };
        let next = CONFIG.replace("host-gw", "ipip").replacen('{', r#"{"EnableNFTables":true,"#, 1);
        let next = ParsedConf::parse(&next).unwrap();
        let before = memory.before(&next);
        let [Before { conf, .. }] = before.as_slice() else { panic!("our lease is of host-gw") };
        assert_eq!((conf.backend.kind(), conf.net_conf.nftables, conf.text.as_str()), ("host-gw", Some(true), CONFIG));
    }

    /// Peers send to the MAC that our lease names for the earlier way, and after a boot no device has it.
    #[test]
    fn an_earlier_device_gets_the_mac_that_our_lease_names() {
        let data = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:77"}"#;
        let way = |kind: &str| Attrs { backend_type: kind.into(), ..Attrs::default() };
        let vxlan = Attrs { backend_data: Some(data.into()), ..way("vxlan") };
        let own = Lease { attrs: way("host-gw").with_other_ways(&[vxlan]), ..just_now().own };
        let head = Head { earlier: vec![CONFIG.replace("host-gw", "vxlan")], own, ..just_now() };
        let started = fits(&["192.168.0.1/24"], None, head).map_err(drop).unwrap();
        let Started { net_conf, backend, host, own, earlier, .. } = started;
        let plan = Plan::new(net_conf, backend, host, own).with_earlier(earlier, false);
        let ways = plan.advertise(plan.host()).unwrap().other_ways();
        assert_eq!(ways.iter().map(|way| way.backend_data.as_deref()).collect::<Vec<_>>(), [Some(data)]);
    }

    #[test]
    fn a_subnet_is_remembered_for_the_same_addresses_and_network_where_none_is_assigned() {
        let net_conf = |text: &str| NetConf::parse(text).unwrap();
        let other = CONFIG.replace("10.5.", "10.6.");
        let (mine, elsewhere) = (just_now().public, ("192.168.0.2".parse().ok(), None));
        for (public, config, assigned, wanted) in [
            (mine, CONFIG, false, Some(just_now().own.subnets)),
            (elsewhere, CONFIG, false, None),
            (mine, &other, false, None),
            (mine, CONFIG, true, None),
        ] {
            let saved = Some(Saved { head: just_now(), peers: Vec::new() });
            let mut memory = EarlierRun { saved, ..EarlierRun::default() };
            let store = Capabilities { expires: true, assigned };
            assert_eq!(memory.subnet(public, &net_conf(config), store), wanted, "{public:?} {config} {assigned}");
        }
    }

    #[test]
    fn net_confs_of_one_network_enable_the_same_families_and_contain_our_subnet() {
        let network = |text: &str| NetConf::parse(text).unwrap();
        let dual = |v4: &str, v6: &str| {
            network(&format!(
                r#"{{"Network":"{v4}","EnableIPv6":true,"IPv6Network":"{v6}","Backend":{{"Type":"vxlan"}}}}"#
            ))
        };
        let (one, own) = (network(CONFIG), Subnets::from_key("10.5.1.0-24").unwrap());
        let same = |other: &NetConf| are_of_one_network(&one, other, &own) && are_of_one_network(other, &one, &own);
        assert!(same(&one) && same(&network(&CONFIG.replace("/16", "/17"))));
        assert!(!same(&network(&CONFIG.replace("10.5.", "10.6."))));
        assert!(!same(&dual("10.5.0.0/16", "fd05::/48")), "pods would have no IPv6 address by one of them");
        let both = Subnets { v6: "fd05:0:0:1::/64".parse().ok(), ..own };
        let all = dual("10.5.0.0/16", "fd05::/48");
        assert!(are_of_one_network(&all, &all, &both));
        assert!(!are_of_one_network(&all, &dual("10.5.0.0/16", "fd06::/48"), &both));
    }
}
