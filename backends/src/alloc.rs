// SPDX-License-Identifier: Apache-2.0
//! alloc: the node gets its subnet, and something else makes the routes, such as the route table of a cloud or BGP. There is no device and
//! there are no entries for peers. Behaviour: docs/flannel-formats.md, "Backends".

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::Annotations;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;

use crate::backend::{Backend, BackendType, EchoAddress, Planned, Skip, families};
use crate::family::publish_ours;
use crate::host::Host;
use crate::options::{BadOption, Options};
use crate::state::State;

/// alloc in the register. Its leases have neither a type nor data.
pub(crate) const TYPE: BackendType = BackendType {
    lease_type: "",
    annotations: Annotations::of_data_or_null,
    makes_routes: false,
    ..BackendType::new("alloc", make)
};

/// The alloc backend. It has no options.
#[derive(Debug)]
struct Alloc {
    families: Vec<Family>,
}

fn make(_options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    Ok(Box::new(Alloc { families: families(net_conf) }))
}

impl Backend for Alloc {
    fn kind(&self) -> &'static str {
        TYPE.kind
    }

    fn makes_routes(&self) -> bool {
        TYPE.makes_routes
    }

    /// Returns true, because nothing is planned for any peer, whatever the type of its lease is.
    fn serves(&self, _backend_type: &str) -> bool {
        true
    }

    fn understands(&self, lease: &Attrs) -> bool {
        lease.backend_type == TYPE.lease_type
    }

    fn echo_address(&self, _peer: &Lease, _family: Family) -> Option<EchoAddress> {
        None
    }

    fn mtu(&self, host: &Host, _family: Family) -> u32 {
        host.uplink.mtu
    }

    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let mut attrs = Attrs::default();
        for family in self.families.iter().copied() {
            publish_ours(&mut attrs, host, family, TYPE.kind)?;
        }
        Ok(attrs)
    }

    fn device(&self, _host: &Host, _own: &Lease) -> State {
        State::new()
    }

    fn plan(&self, _host: &Host, _own: &Lease, _peer: &Lease) -> Planned {
        Planned::default()
    }
}
