// SPDX-License-Identifier: Apache-2.0
//! The start of the agent, until it has a lease: it reads net-conf, chooses the uplink, finds the own lease and acquires it. Whatever
//! is missing is waited for, and logged once a minute.

pub mod identities;
mod ports;
mod resume;
mod secret_files;
mod waiting;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use weft_backends::backend::{Backend, Skip};
use weft_backends::host::Host;
use weft_backends::identity::Identities;
use weft_backends::register::{self, TYPES};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::env::SubnetEnv;
use weft_subnet::evidence::{self, Evidence, Proof};
use weft_subnet::lease::{Age, Lease};
use weft_subnet::net_conf::NetConf;
use weft_subnet::saved_peers::{ClearText, Saved};
use weft_subnet::source::{LeaseRequest, Source};

use crate::extension::FirstCommand;
use crate::files;
use crate::firewall::guard;
use crate::kernel::{Kernel, Machine, MachineError};
use crate::options::UplinkChoice;
use crate::plan::{ExtraBackend, ParsedConf, foreign_networks};
use crate::subnet_file::{self, Author};
use crate::uplink::{self, Candidates, EarlierUse, Families, Picked};

use identities::Kept;
pub use resume::EarlierRun;
pub use secret_files::{SecretFiles, kept_wireguard_key};
use waiting::StartError;
pub use waiting::Waiting;

/// What a start found, and from which the node continues.
pub struct Started {
    /// The net-conf.
    pub net_conf: NetConf,
    /// Its raw text, to see changes.
    pub config: String,
    /// The backend it names.
    pub backend: Box<dyn Backend>,
    /// The facts about this machine.
    pub host: Host,
    /// Our lease.
    pub own: Lease,
    /// Who wrote the subnet.env that was found, if it names this Network.
    pub author: Author,
    /// How the uplink was chosen: by the flags, and before them by what an administrator wrote into the store.
    pub uplink: UplinkChoice,
    /// The addresses that an administrator wrote into the store.
    pub chosen: [Option<IpAddr>; 2],
    /// The saved lease and peers, if the store is away.
    pub saved: Option<Saved>,
    /// The net-conf in the store, if it names another backend than our lease. The node begins with the backend of its lease, because
    /// peers reach its pods that way, and then changes to this one.
    pub wanted: Option<String>,
    /// The earlier backends by which peers still reach this node, in the order in which packets preferred them.
    pub earlier: Vec<ExtraBackend>,
    /// The earlier run still sent packets by the earlier backends, because the other nodes had not had the time to learn of our lease.
    pub sends_earlier: bool,
    /// What an earlier run saved about packets in clear text, if one of these backends sends such packets and that of our lease encrypts.
    pub clear_text: Option<ClearText>,
}

impl Started {
    /// Returns a start with one backend, which knows no peers yet.
    fn new(conf: ParsedConf, author: Author, leased: Leased) -> Started {
        let ParsedConf { text, net_conf, backend } = conf;
        let Leased { host, own, uplink, chosen, .. } = leased;
        Started {
            net_conf,
            config: text,
            backend,
            host,
            own,
            author,
            uplink,
            chosen,
            saved: None,
            wanted: None,
            earlier: Vec::new(),
            sends_earlier: false,
            clear_text: None,
        }
    }
}

/// What a start needs.
pub struct StartContext<'a, K> {
    /// The store of leases.
    pub store: &'a dyn Source,
    /// The kernel, with its links, addresses and routes.
    pub kernel: &'a mut K,
    /// How the external interface is chosen.
    pub choice: &'a UplinkChoice,
    /// The path of subnet.env. The file may be one of an earlier run or of flannel.
    pub subnet_file: &'a Path,
    /// True if the lease names the addresses from which our tunnel packets come.
    pub guard: bool,
    /// What an earlier run saved.
    pub memory: EarlierRun,
    /// Where backends keep their secrets.
    pub secrets: SecretFiles,
    /// Runs the command that a backend may have before there is a lease.
    pub first_command: FirstCommand,
}

/// Waits for everything that a node needs, and acquires a lease. If the store is away, it continues with what was saved. It returns only
/// when there is a lease, so the caller must end it at a shutdown.
pub async fn start<K: Kernel>(mut context: StartContext<'_, K>, mut waiting: Waiting<'_>) -> Started {
    loop {
        let error = match attempt(&mut context).await {
            Ok(started) => return started,
            Err(error) => error,
        };
        let error = match resume_after(&mut context, error).await {
            Ok(started) => return started,
            Err(error) => error,
        };
        waiting.on(error).await;
    }
}

/// Continues with what was saved, if the attempt to start has failed with `error` because the store is away.
async fn resume_after<K: Kernel>(context: &mut StartContext<'_, K>, error: StartError) -> Result<Started, StartError> {
    let StartError::Store { config, .. } = &error else { return Err(error) };
    if !error.is_store_away() {
        return Err(error);
    }
    resume::run_first_command(context, config.as_deref()).await?;
    resume::from_saved(context, config.as_deref()).ok_or(error)
}

async fn attempt<K: Kernel>(context: &mut StartContext<'_, K>) -> Result<Started, StartError> {
    let text = context.store.config().await.map_err(StartError::store("net-conf: ", None))?;
    let conf = ParsedConf::parse(&text)?;
    let (author, previous) = read_subnet_file(context.subnet_file, &conf.net_conf);
    for before in context.memory.before(&conf) {
        let fits = |mine: Option<&Attrs>| mine.is_some_and(|mine| before.fits(&*conf.backend, mine));
        match lease(context, &before.conf, previous, fits).await {
            Ok(Some(leased)) => {
                let started = started(context, before.conf, author, leased)?;
                return Ok(Started { wanted: Some(conf.text), ..started });
            }
            Ok(None) => {}
            // Nobody needs to wait for a backend that net-conf names no more.
            Err(StartError::Identity(reason)) => {
                let kind = before.conf.backend.kind();
                context.memory.log_unusable(format!("the earlier backend {kind} cannot work on this node: {reason}"));
            }
            Err(error) => return Err(error),
        }
    }
    context.first_command.run(&*conf.backend).await?;
    let leased = lease(context, &conf, previous, |_| true).await?;
    let leased = leased.ok_or(StartError::OtherBackend)?;
    started(context, conf, author, leased)
}

/// Our lease, and the facts from which it was made.
struct Leased {
    host: Host,
    own: Lease,
    /// The content that the lease had before.
    was: Option<Attrs>,
    uplink: UplinkChoice,
    chosen: [Option<IpAddr>; 2],
}

/// Adds the earlier backends that our lease named, and returns what the node continues from.
fn started<K: Kernel>(
    context: &mut StartContext<'_, K>,
    conf: ParsedConf,
    author: Author,
    mut leased: Leased,
) -> Result<Started, StartError> {
    let mut earlier = Vec::new();
    // Only a lease that names other ways has earlier backends.
    if let Some(was) = leased.was.take().filter(|was| was.other_ways.is_some()) {
        // The store has had its time since the facts of the lease were read.
        let machine = context.kernel.machine().map_err(MachineError)?;
        earlier = earlier_backends(context, &machine, &conf, &leased.host, &was)?;
        leased.host = ports::with_those_of(context.kernel, &machine, leased.host, &earlier);
    }
    let (sends_earlier, clear_text) = (context.memory.sent_earlier(&conf, &earlier), context.memory.clear_text());
    Ok(Started { earlier, sends_earlier, clear_text, ..Started::new(conf, author, leased) })
}

/// Returns the earlier backends that this lease of ours names as other ways to reach this node. `conf` is that of the lease, and `host` has
/// the identities of its backend.
fn earlier_backends<K: Kernel>(
    context: &mut StartContext<'_, K>,
    machine: &Machine,
    conf: &ParsedConf,
    host: &Host,
    lease: &Attrs,
) -> Result<Vec<ExtraBackend>, Skip> {
    let mut earlier = Vec::new();
    for then in context.memory.earlier(&conf.net_conf, lease) {
        let old = &*then.backend;
        if old.advertise(host).is_ok_and(|attrs| conf.backend.understands(&attrs)) {
            continue;
        }
        // Peers send to the identity that the lease names for this way. After a boot no device has it.
        let way = lease.other_ways().into_iter().find(|way| old.understands(way));
        let kept = Kept { secrets: &context.secrets, printed: None };
        let identities = identities::chosen(old, machine, kept, way.as_ref())?;
        earlier.push(ExtraBackend::new(then, Host { identities, ..host.clone() }));
    }
    Ok(earlier)
}

/// Returns who wrote subnet.env, and which subnet it names. If there is none, or one for another Network, flannel left nothing on this node,
/// and the author counts as weft.
fn read_subnet_file(subnet_file: &Path, net_conf: &NetConf) -> (Author, Option<Subnets>) {
    let env = files::read_text(subnet_file).ok().and_then(|text| SubnetEnv::parse(&text));
    let subnets = env.filter(|env| env.networks == net_conf.networks).map(|env| env.subnets);
    (if subnets.is_some() { subnet_file::author(subnet_file) } else { Author::Weft }, subnets)
}

/// Returns the choice of the uplink by the flags, with the addresses that an administrator wrote into the store in place of theirs.
fn with_chosen(choice: &UplinkChoice, chosen: [Option<IpAddr>; 2]) -> UplinkChoice {
    let mut choice = choice.clone();
    for ip in chosen.into_iter().flatten() {
        match ip {
            IpAddr::V4(v4) => choice.public_ip = Some(v4),
            IpAddr::V6(v6) => choice.public_ipv6 = Some(v6),
        }
    }
    choice
}

/// Takes our lease for the backend of this net-conf. `previous` is the subnet that subnet.env names. `fits` gets what our lease in the
/// store says, if there is one. If it returns false, nothing is changed, and this returns `None`.
async fn lease<K: Kernel>(
    context: &mut StartContext<'_, K>,
    conf: &ParsedConf,
    previous: Option<Subnets>,
    fits: impl Fn(Option<&Attrs>) -> bool,
) -> Result<Option<Leased>, StartError> {
    let ParsedConf { text, net_conf, backend } = conf;
    let failed = |what| StartError::store(what, Some(text));
    let chosen = context.store.chosen().await.map_err(failed(""))?;
    let choice = with_chosen(context.choice, chosen);
    let machine = context.kernel.machine_towards(choice.can_reach).map_err(MachineError)?;
    let before = context.memory.uplink(&choice);
    let candidates = candidates(&machine, net_conf, previous.unwrap_or_default()).after(before.clone());
    let mut picked = uplink::pick(&choice, &candidates)?;
    let public = (picked.public_v4, picked.public_v6);
    let previous = previous.or_else(|| context.memory.subnet(public, net_conf, context.store.capabilities()));
    let ports = [backend.ports(&host(&picked, &machine, net_conf, Identities::default()))];
    let ports = ports.into_iter().chain(context.memory.ports()).collect();
    let evidence = Evidence {
        reservations: register::names_its_leases(backend.kind()),
        previous,
        identities: identities::standing(&**backend, &machine, &context.secrets)?,
        public: vec![public],
        ports,
        other_uplink: candidates.possible_addresses(picked.uplink.name),
        ..Evidence::none(TYPES)
    };
    let mine = context.store.own(&evidence).await.map_err(failed("own lease: "))?;
    if !fits(mine.as_ref().map(|mine| &mine.attrs)) {
        return Ok(None);
    }
    if let Some(lease) = &mine {
        warn_of_foreign_address(&evidence, lease, &machine);
        // The address that was published so far stays published if the choice permits it.
        let before = EarlierUse { published: Some(evidence::public(&lease.attrs)), ..before };
        picked = uplink::pick(&choice, &candidates.after(before))?;
    }
    let kept = Kept { secrets: &context.secrets, printed: context.first_command.printed() };
    let identities = identities::chosen(&**backend, &machine, kept, mine.as_ref().map(|lease| &lease.attrs))?;
    let host = host(&picked, &machine, net_conf, identities);
    let kept_ports = ports::kept_ports(context.kernel, &machine, &**backend, &host);
    let host = Host { kept_ports, ..host };
    let request = request(&host, conf, previous, mine, context.guard)?;
    let own = context.store.acquire(&request).await.map_err(failed("lease: "))?;
    Ok(Some(Leased { host, own, was: request.was, uplink: choice, chosen }))
}

/// Returns what the store is asked for. `mine` is our lease as the store has it now. Without one, `previous` is the subnet that this node
/// had before.
fn request(
    host: &Host,
    conf: &ParsedConf,
    previous: Option<Subnets>,
    mine: Option<Lease>,
    guard: bool,
) -> Result<LeaseRequest, Skip> {
    let mut attrs = conf.backend.advertise(host)?;
    if guard {
        attrs = guard::with_tunnel_addresses(attrs, host);
    }
    // Some peers may only know another backend of this node. The node removes later those that it cannot keep.
    if let Some(before) = mine.as_ref().map(|lease| &lease.attrs).filter(|attrs| attrs.other_ways.is_some()) {
        attrs.other_ways.clone_from(&before.other_ways);
        // If one of them is udp, its peers need the address from which our packets come.
        attrs.tunnel_ip = attrs.tunnel_ip.or(before.tunnel_ip);
    }
    let had = mine.as_ref().map(|lease| lease.subnets).or(previous).unwrap_or_default();
    let before = Lease { id: "".into(), subnets: had, attrs: Attrs::default(), age: Age::default() };
    let connected = foreign_networks(host, &*conf.backend, &before, &BTreeSet::new());
    Ok(LeaseRequest { net_conf: conf.net_conf.clone(), attrs, previous, was: mine.map(|lease| lease.attrs), connected })
}

/// Warns if the only reason to take this lease is an address that this host does not have. The usual reason is a NAT, and a lost disk. But
/// if another machine has the address, both nodes use one subnet from now on, and nothing in the store shows that.
fn warn_of_foreign_address(evidence: &Evidence, lease: &Lease, machine: &Machine) {
    let (v4, v6) = evidence::public(&lease.attrs);
    let Some(ip) = v4.map(IpAddr::V4).or(v6.map(IpAddr::V6)) else { return };
    let is_here = machine.addrs.iter().any(|addr| addr.net.addr() == ip);
    if evidence.proof(lease) == Some(Proof::Address) && !is_here {
        tracing::warn!(
            subnet = %lease.subnets,
            address = %ip,
            "the lease of an address that is not on this host is taken over, because nothing else is known about this node"
        );
    }
}

/// Returns the candidates for the uplink with this net-conf. `own` is the subnet of our pods, if it is known.
pub fn candidates<'a>(machine: &'a Machine, net_conf: &NetConf, own: Subnets) -> Candidates<'a> {
    let families = Families { v4: net_conf.networks.v4.is_some(), v6: net_conf.networks.v6.is_some() };
    Candidates::new(machine, families, own)
}

/// Returns the facts with which backends plan.
pub fn host(picked: &Picked, machine: &Machine, net_conf: &NetConf, identities: Identities) -> Host {
    Host {
        public_v4: picked.public_v4,
        public_v6: picked.public_v6,
        wireguard_port: picked.wireguard_port,
        identities,
        routes: machine.on_link(),
        connected: machine.connected(&net_conf.networks),
        ..Host::new(picked.uplink.clone())
    }
}

#[cfg(test)]
pub(crate) mod tests;
