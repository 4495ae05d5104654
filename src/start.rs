// SPDX-License-Identifier: Apache-2.0
//! From nothing to a lease: config, uplink, own lease, acquire. Whatever is missing is waited for and said once a minute.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use weft_backends::backend::{self, Backend};
use weft_backends::host::Host;
use weft_backends::state::{Key, LinkKind, Mac, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::env::SubnetEnv;
use weft_subnet::lease::{Age, Lease};
use weft_subnet::network::Network;
use weft_subnet::source::{Claim, Source};

use crate::guard;
use crate::health::Readiness;
use crate::kernel::{Kernel, Machine};
use crate::notify::Notify;
use crate::options::UplinkChoice;
use crate::pass;
use crate::say::{Patience, chain};
use crate::uplink::{self, Picked};

const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What a node starts from.
pub struct Started {
    /// The net-conf.
    pub network: Network,
    /// Its raw text, to see changes.
    pub config: String,
    /// The backend it names.
    pub backend: Box<dyn Backend>,
    /// The machine's facts.
    pub host: Host,
    /// Our lease.
    pub own: Lease,
    /// subnet.env as found named this Network.
    pub flannel_was_here: bool,
    /// How the uplink was chosen: as we were told, by the store's admin before all.
    pub uplink: UplinkChoice,
}

/// Where a node starts.
pub struct Place<'a, K> {
    /// Where leases are.
    pub store: &'a dyn Source,
    /// Links, addresses and routes.
    pub kernel: &'a mut K,
    /// How the external interface is chosen.
    pub choice: &'a UplinkChoice,
    /// subnet.env, perhaps of an earlier run or of flannel.
    pub subnet_file: &'a Path,
    /// The lease says where our tunnel packets come from.
    pub guard: bool,
}

/// Says what is waited for: in the log, to systemd, in /readyz and `weft status`.
pub struct Waiting<'a> {
    patience: Patience,
    notify: &'a mut Notify,
    readiness: Readiness,
}

impl Waiting<'_> {
    /// Nothing is waited for yet.
    pub fn new(notify: &mut Notify, readiness: Readiness) -> Waiting<'_> {
        Waiting { patience: Patience::default(), notify, readiness }
    }

    async fn on(&mut self, text: String) {
        if self.patience.due(&text, Instant::now()) {
            tracing::warn!("waiting: {text}");
        }
        self.notify.status(&format!("waiting: {text}"));
        self.readiness.set([format!("waiting: {text}")]);
        self.notify.ping();
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Waits for everything that a node needs, and takes a lease. Ends only when there is one; the caller races it with shutdown.
pub async fn start<K: Kernel>(mut place: Place<'_, K>, mut waiting: Waiting<'_>) -> Started {
    loop {
        let (config, network, backend) = config(place.store, &mut waiting).await;
        let found = std::fs::read_to_string(place.subnet_file).ok().and_then(|text| SubnetEnv::parse(&text));
        let flannel_was_here = found.as_ref().is_some_and(|env| env.networks == network.networks);
        let previous = found.filter(|_| flannel_was_here).map(|env| env.subnets);
        match lease(&mut place, &network, &*backend, previous).await {
            Ok((host, own, uplink)) => {
                return Started { network, config, backend, host, own, flannel_was_here, uplink };
            }
            Err(text) => waiting.on(text).await,
        }
    }
}

async fn config(store: &dyn Source, waiting: &mut Waiting<'_>) -> (String, Network, Box<dyn Backend>) {
    loop {
        let text = match store.config().await {
            Ok(text) => text,
            Err(error) => {
                waiting.on(format!("net-conf: {}", chain(&error))).await;
                continue;
            }
        };
        match parse(&text) {
            Ok((network, backend)) => return (text, network, backend),
            Err(reason) => waiting.on(reason).await,
        }
    }
}

/// Reads net-conf and makes its backend; the error is a sentence.
pub fn parse(text: &str) -> Result<(Network, Box<dyn Backend>), String> {
    let network = Network::parse(text).map_err(|bad| format!("net-conf: {bad}"))?;
    let backend = backend::make(&network).map_err(|bad| format!("net-conf: {bad}"))?;
    Ok((network, backend))
}

async fn lease<K: Kernel>(
    place: &mut Place<'_, K>,
    network: &Network,
    backend: &dyn Backend,
    previous: Option<Subnets>,
) -> Result<(Host, Lease, UplinkChoice), String> {
    let mut choice = place.choice.clone();
    for ip in place.store.chosen().await.map_err(|error| chain(&error))?.into_iter().flatten() {
        match ip {
            IpAddr::V4(v4) => choice.public_ip = Some(v4),
            IpAddr::V6(v6) => choice.public_ipv6 = Some(v6),
        }
    }
    let machine = place.kernel.machine().map_err(|error| unreadable(&error))?;
    let picked = pick(&choice, &machine, network)?;
    let who = Attrs { public_ip: picked.public_v4, public_ipv6: picked.public_v6, ..Attrs::default() };
    let mine = place.store.own(&who, previous).await.map_err(|error| format!("own lease: {}", chain(&error)))?;
    let mut host = host(&picked, &machine, (Mac([0; 6]), Mac([0; 6])));
    let existing = device_macs(backend, &host, &machine, network);
    let stored = mine.as_ref().map(|lease| macs(&lease.attrs)).unwrap_or_default();
    host.vtep_mac_v4 = stored.0.or(existing.0).unwrap_or_else(random_mac);
    host.vtep_mac_v6 = stored.1.or(existing.1).unwrap_or_else(random_mac);
    let mut attrs = backend.advertise(&host).map_err(|skip| skip.0)?;
    if place.guard {
        attrs = guard::stated(attrs, &host);
    }
    let claim = Claim { network: network.clone(), attrs, previous };
    let own = place.store.acquire(&claim).await.map_err(|error| format!("lease: {}", chain(&error)))?;
    Ok((host, own, choice))
}

/// The uplink for the families of this network; the error is a sentence.
pub fn pick(choice: &UplinkChoice, machine: &Machine, network: &Network) -> Result<Picked, String> {
    let families = (network.networks.v4.is_some(), network.networks.v6.is_some());
    uplink::pick(choice, machine, families).map_err(|error| chain(&error))
}

/// The facts that backends plan with.
pub fn host(picked: &Picked, machine: &Machine, macs: (Mac, Mac)) -> Host {
    Host {
        uplink: picked.uplink.clone(),
        public_v4: picked.public_v4,
        public_v6: picked.public_v6,
        vtep_mac_v4: macs.0,
        vtep_mac_v6: macs.1,
        routes: pass::on_link(machine),
    }
}

/// The VTEP MACs that a lease states, IPv4 and IPv6.
pub fn macs(attrs: &Attrs) -> (Option<Mac>, Option<Mac>) {
    let mac = |data: &Option<Box<str>>| -> Option<Mac> {
        let data: serde_json::Value = serde_json::from_str(data.as_deref()?).ok()?;
        let text = data.get("VtepMAC")?.as_str()?;
        let mut mac = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut mac {
            *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
        }
        (parts.next().is_none() && mac != [0; 6] && mac[0] & 1 == 0).then_some(Mac(mac))
    };
    (mac(&attrs.backend_data), mac(&attrs.backend_v6_data))
}

/// The MACs that the backend's devices have now, if they exist.
fn device_macs(backend: &dyn Backend, host: &Host, machine: &Machine, network: &Network) -> (Option<Mac>, Option<Mac>) {
    let own = Lease { id: "".into(), subnets: network.networks, attrs: Attrs::default(), age: Age::default() };
    let mut macs = (None, None);
    for (key, value) in backend.device(host, &own) {
        let (Key::Link(name), Value::Link(link)) = (key, value) else { continue };
        let LinkKind::Vxlan { local, .. } = link.kind else { continue };
        let there = machine.links.iter().find(|link| link.name == name).and_then(|link| link.mac);
        if local.is_ipv4() {
            macs.0 = there;
        } else {
            macs.1 = there;
        }
    }
    macs
}

/// A random unicast, locally administered address.
fn random_mac() -> Mac {
    let random = RandomState::new().build_hasher().finish().to_be_bytes();
    let [_, _, a, b, c, d, e, f] = random;
    Mac([(a & 0xfc) | 0x02, b, c, d, e, f])
}

/// The kernel could not be read: not a fault of ours, tried again at the next look.
pub fn unreadable(error: &io::Error) -> String {
    format!("read links and routes: {error}")
}
