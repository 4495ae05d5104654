// SPDX-License-Identifier: Apache-2.0
//! What a backend decides. Which backends there are is in [`crate::register`].

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::{Annotations, PublicIdentities, PublicPorts};
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;
use weft_subnet::text::Shown;

use crate::commands::{CommandPeer, Commands, Variable};
use crate::host::Host;
use crate::identity::{Found, Identities};
use crate::options::{BadOption, Options};
use crate::state::{Key, Name, State, Value};
use crate::tunnel::{Tunnel, TunnelPeer};
use crate::wireguard_key::DeviceSecrets;

pub use crate::skip::Skip;

/// Makes a backend from its options, for this net-conf.
pub type Make = fn(&Options, &NetConf) -> Result<Box<dyn Backend>, BadOption>;

/// A type of backend: what is known about it without net-conf, and how a backend of this type is made. The file of each backend has one.
pub struct BackendType {
    /// `Backend.Type` in net-conf.
    pub kind: &'static str,
    /// `BackendType` of its leases. It is empty if they have none.
    pub lease_type: &'static str,
    /// Makes a backend from its options.
    pub make: Make,
    /// Returns the identities that a lease of this type names. One that no device can have is left out.
    pub identities: fn(&Attrs) -> PublicIdentities,
    /// Returns the annotations of a Node for a lease of this type.
    pub annotations: fn(&Attrs) -> Annotations,
    /// The ports that a lease of this type names, if several nodes may share one published address.
    pub ports: fn(&Attrs) -> PublicPorts,
    /// False if something else makes the routes to the peers. [`Backend::makes_routes`] of this type returns the same.
    pub makes_routes: bool,
    /// The kind of its devices, as the kernel names it. The module of the kernel that makes them has the same name. `None` if it has no devices.
    pub device_kind: Option<&'static str>,
}

impl BackendType {
    /// Returns a type whose leases have its name, have no identity, and publish the data of the families that have any. It makes routes, and
    /// has no devices.
    pub(crate) const fn new(kind: &'static str, make: Make) -> BackendType {
        let identities: fn(&Attrs) -> PublicIdentities = |_| [None, None];
        let ports: fn(&Attrs) -> PublicPorts = |_| [None, None];
        let (lease_type, annotations) = (kind, Annotations::of_data);
        BackendType { kind, lease_type, make, identities, annotations, ports, makes_routes: true, device_kind: None }
    }
}

/// A lease has another type than the backend that is asked for it.
#[derive(Debug, thiserror::Error)]
#[error("BackendType is \"{given}\", not {wanted:?}")]
struct OtherType {
    given: String,
    wanted: &'static str,
}

/// The plan for one remote lease. Each family is planned by itself, so a fault in one does not harm the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Planned {
    /// The entries of the families that can be reached. If they need another device than our own, because the peer has another VNI or
    /// another type of backend, that link and its address are entries, too. The index merges equal contributions of many peers.
    pub state: State,
    /// One reason for each family that cannot be reached.
    pub skipped: Vec<Skip>,
}

impl Planned {
    /// Returns a plan without entries, for this reason.
    pub(crate) fn none(reason: Skip) -> Planned {
        Planned { state: State::new(), skipped: vec![reason] }
    }

    /// Adds the plan of one family.
    pub(crate) fn take(&mut self, half: Result<State, Skip>) {
        match half {
            Ok(state) if self.state.is_empty() => self.state = state,
            Ok(state) => self.state.extend(state),
            Err(skip) => self.skipped.push(skip),
        }
    }
}

/// Which address of a peer answers echo requests that take the way of the packets for its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EchoAddress {
    /// The address of its tunnel device, which is the first address of its subnet.
    Device {
        /// This address.
        address: IpAddr,
        /// [`Backend::outer_family`].
        outer: Option<Family>,
    },
    /// Its published address, because there is no tunnel.
    Published(IpAddr),
}

/// Everything that a backend decides. It does no I/O, and uses neither a clock nor random numbers.
pub trait Backend {
    /// Returns `Backend.Type` of net-conf.
    fn kind(&self) -> &'static str;
    /// Returns true if this backend, as that of net-conf, plans for leases of this `BackendType`. Leases of another type are planned
    /// by the backend of that type.
    fn serves(&self, backend_type: &str) -> bool {
        backend_type == self.kind()
    }
    /// Returns true if our own device of this backend, with its present options, reaches the node with this lease. Options that two nodes must
    /// share count, such as the VNI. Unlike [`Backend::serves`], this does not include leases for which a peer's plan brings another
    /// device. A lease whose data cannot be read counts as understood, and its plan says what is wrong with it.
    fn understands(&self, lease: &Attrs) -> bool {
        lease.backend_type == self.kind()
    }
    /// Returns true if the lease of a node with flannel always shows whether [`Backend::understands`] is true for it. Otherwise such a node
    /// may follow a change of an option without a sign of it in its lease, so an earlier backend with another option is kept for a limited
    /// time only.
    fn knows_options_of_flannel(&self) -> bool {
        true
    }
    /// Returns false if something else makes the routes to the peers, such as the route table of a cloud or BGP. Then no lease gets an
    /// entry. `--fail-closed` has no effect, because the way to the peers may be the default route. And no existing route counts as one of
    /// flannel, because those of other programs may look the same.
    fn makes_routes(&self) -> bool {
        true
    }
    /// Returns true if this backend encrypts the packets between nodes.
    fn encrypts(&self) -> bool {
        false
    }
    /// Returns why a lease of another type is not reached: this backend encrypts, and the other one would send packets in clear text.
    /// `None` if leases of other types are reached by the backends of their types.
    fn refuses(&self, _backend_type: &str) -> Option<Skip> {
        None
    }
    /// Returns the secrets of our WireGuard devices. They are handed to the kernel separately, and no entry contains them.
    fn secrets(&self, _host: &Host) -> Option<DeviceSecrets> {
        None
    }
    /// Returns the largest packet of this family that a pod may send over this backend, in bytes.
    fn mtu(&self, host: &Host, family: Family) -> u32;
    /// Returns the MTU of the underlay from which [`Backend::mtu`] is computed: that of the uplink, unless `Backend.MTU` is smaller.
    fn underlay_mtu(&self, host: &Host) -> u32 {
        host.uplink.mtu
    }
    /// Returns what net-conf asks for and this host cannot do, and what is done instead, as text for people.
    fn remark(&self, _host: &Host) -> Option<String> {
        None
    }
    /// Returns the identities of our devices that an earlier run of this agent left. They show which lease is ours. What another program
    /// or another agent made does not count.
    ///
    /// # Errors
    /// An identity exists and cannot be read, so it is unknown which lease is ours.
    fn standing_identities(&self, _found: &Found<'_>) -> Result<PublicIdentities, Skip> {
        Ok(PublicIdentities::default())
    }
    /// Returns the identities that our devices have from now on: those that were kept, or else new ones. `lease` is our lease, if one was
    /// found in the store or was saved. If a change of the identities has not ended, it says which of them the peers know. This is called once
    /// at the start, and writes what must be kept in a file.
    ///
    /// # Errors
    /// What is kept cannot be read or written.
    fn identities(&self, _found: &Found<'_>, _lease: Option<&Attrs>) -> Result<Identities, Skip> {
        Ok(Identities::default())
    }
    /// Returns the identities to use when our own lease in the store has this content. A backend whose device follows the lease (vxlan)
    /// returns those that the lease names. One whose lease follows a file returns `now`, and the lease is written again.
    fn follow(&self, now: &Identities, _lease: &Attrs) -> Identities {
        now.clone()
    }
    /// Makes identities that are to replace those in use. They are kept nowhere yet. Returns `None` if this backend cannot replace its identities
    /// while the agent runs.
    ///
    /// # Errors
    /// When they cannot be made, or have no place.
    fn new_identities(&self, _found: &Found<'_>) -> Result<Option<Identities>, Skip> {
        Ok(None)
    }
    /// Keeps the identities of [`Backend::new_identities`] where a start finds them. This comes before the devices get them and before our lease
    /// names them, so that they cannot be lost.
    ///
    /// # Errors
    /// When they cannot be kept, or when an earlier change has not ended.
    fn begin_change(&self, _found: &Found<'_>, _next: &Identities) -> Result<(), Skip> {
        Ok(())
    }
    /// Returns the identities of [`Backend::begin_change`] until [`Backend::end_change`].
    ///
    /// # Errors
    /// What is kept cannot be read.
    fn next_identities(&self, _found: &Found<'_>) -> Result<Option<Identities>, Skip> {
        Ok(None)
    }
    /// Ends a change of the identities: those of [`Backend::begin_change`] are in use and in our lease if they were `accepted`, and
    /// are forgotten otherwise.
    ///
    /// # Errors
    /// When what is kept cannot be written. Then a start ends the change.
    fn end_change(&self, _found: &Found<'_>, _accepted: bool) -> Result<(), Skip> {
        Ok(())
    }
    /// Returns the ports that our lease will name, if several nodes may share one published address.
    fn ports(&self, _host: &Host) -> PublicPorts {
        [None, None]
    }
    /// Returns the content of our lease, which is known before the device exists.
    ///
    /// # Errors
    /// The host cannot serve this backend, for example host-gw with a PublicIP that is not an address of the interface.
    fn advertise(&self, host: &Host) -> Result<Attrs, Skip>;
    /// Returns our links, their addresses, and other entries that do not belong to a peer. `own` is our lease.
    fn device(&self, host: &Host, own: &Lease) -> State;
    /// Returns the UDP port that each of those of our links should have whose port can change in place.
    fn listen_ports(&self, host: &Host, own: &Lease) -> BTreeMap<Name, u16> {
        let port = |(key, value): (&Key, &Value)| match (key, value) {
            (Key::Link(name), Value::Link(link)) => Some((*name, link.kind.listen_port()?)),
            _ => None,
        };
        self.device(host, own).iter().filter_map(port).collect()
    }
    /// Returns the entries for one remote lease, and the reasons why families had to be left out.
    fn plan(&self, host: &Host, own: &Lease, peer: &Lease) -> Planned;
    /// Returns the address of a peer that probes of this family are sent to. `None` if the backend does not know one.
    fn echo_address(&self, peer: &Lease, family: Family) -> Option<EchoAddress> {
        let address = peer.subnets.of(family)?.network();
        Some(EchoAddress::Device { address, outer: self.outer_family(family) })
    }
    /// Returns the family of the packets between the nodes that carry packets of this family. `None` if it is IPv4 wherever both nodes have
    /// it.
    fn outer_family(&self, _family: Family) -> Option<Family> {
        None
    }
    /// Returns the tunnel through which the agent itself carries packets, if the kernel has no device for this backend. `own` is our lease.
    fn tunnel(&self, _host: &Host, _own: &Lease) -> Option<Tunnel> {
        None
    }
    /// Returns how that tunnel reaches a peer whose lease this backend serves. `None` if it does not.
    fn tunnel_peer(&self, _host: &Host, _peer: &Lease) -> Option<TunnelPeer> {
        None
    }
    /// Returns the commands that the agent runs for this backend, where they make the way to the peers.
    fn commands(&self) -> Option<&Arc<Commands>> {
        None
    }
    /// Returns the variables of the command that runs when this node has its lease `own`.
    fn own_variables(&self, _own: &Lease) -> Vec<Variable> {
        Vec::new()
    }
    /// Returns what the commands get to know of a peer whose lease this backend serves. Returns `None` if no command is run for it.
    fn command_peer(&self, _peer: &Lease) -> Option<CommandPeer> {
        None
    }
}

/// Returns the families that this net-conf enables.
pub(crate) fn families(net_conf: &NetConf) -> Vec<Family> {
    Family::BOTH.into_iter().filter(|f| net_conf.networks.of(*f).is_some()).collect()
}

/// Checks that the lease has this type, because its data have another meaning otherwise.
pub(crate) fn of_kind(kind: &'static str, peer: &Lease) -> Result<(), Skip> {
    if peer.attrs.backend_type == kind {
        return Ok(());
    }
    let given = Shown(&peer.attrs.backend_type).to_string();
    Err(Skip::new(OtherType { given, wanted: kind }))
}
