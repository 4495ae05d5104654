// SPDX-License-Identifier: Apache-2.0
//! The UDP ports of WireGuard devices that stand before a start. Our lease goes on to name them until the first pass has given the devices
//! those of net-conf. Before that nobody listens on the ports of net-conf, and if another program has one of them, the kernel refuses it
//! for days.

use std::collections::BTreeMap;
use std::io;

use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_backends::state::Name;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Lease};

use crate::kernel::{Creator, Kernel, Machine};
use crate::plan::ExtraBackend;

/// Returns the ports on which devices of this backend listen already, if they are others than it wants. `host` has its identities.
pub(super) fn kept_ports<K: Kernel>(
    kernel: &mut K,
    machine: &Machine,
    backend: &dyn Backend,
    host: &Host,
) -> BTreeMap<Name, u16> {
    // No port depends on our lease, which is not known yet.
    let own = Lease { id: "".into(), subnets: Subnets::default(), attrs: Attrs::default(), age: Age::default() };
    let wanted = backend.listen_ports(host, &own);
    let listening = listening(kernel, machine, &wanted).unwrap_or_else(|error| {
        tracing::warn!("read the ports of WireGuard devices: {error}: our lease names those of net-conf");
        BTreeMap::new()
    });
    let kept: BTreeMap<Name, u16> =
        listening.into_iter().filter(|(name, port)| wanted.get(name) != Some(port)).collect();
    // One of them may be the port that another device has in net-conf. Our lease cannot name both, so it names those of net-conf.
    let with_kept = Host { kept_ports: kept.clone(), ..host.clone() };
    if backend.advertise(&with_kept).is_ok() { kept } else { BTreeMap::new() }
}

/// Adds the ports that devices of earlier backends keep. Our lease names them in its other ways.
pub(super) fn with_those_of<K: Kernel>(
    kernel: &mut K,
    machine: &Machine,
    mut host: Host,
    earlier: &[ExtraBackend],
) -> Host {
    for (backend, of_backend) in earlier.iter().map(ExtraBackend::planned) {
        for (name, port) in kept_ports(kernel, machine, backend, of_backend) {
            host.kept_ports.entry(name).or_insert(port);
        }
    }
    host
}

/// Returns the ports on which those of these devices listen that may be ours.
fn listening<K: Kernel>(
    kernel: &mut K,
    machine: &Machine,
    wanted: &BTreeMap<Name, u16>,
) -> io::Result<BTreeMap<Name, u16>> {
    let may_be_ours =
        |name: &Name| machine.links.iter().any(|link| link.name == *name && link.creator != Creator::AnotherAgent);
    let devices: Vec<Name> = wanted.keys().copied().filter(may_be_ours).collect();
    if devices.is_empty() { Ok(BTreeMap::new()) } else { kernel.listen_ports(&devices) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::diff::Op;
    use weft_backends::host::Uplink;
    use weft_backends::link::Link;
    use weft_backends::state::{Key, Value};
    use weft_backends::wireguard::WireGuardLink;
    use weft_backends::wireguard_key::{KeyPair, Secret};

    use super::*;
    use crate::kernel::LinkInfo;
    use crate::kernel::fake::{self, FakeKernel};
    use crate::plan::ParsedConf;

    /// Returns the ports that the lease goes on to name when these devices listen on these ports.
    fn kept(devices: &[(&str, u16)]) -> Vec<(String, u16)> {
        let conf = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48",
                       "Backend":{"Type":"wireguard","ListenPort":4500,"ListenPortV6":51820}}"#;
        let conf = ParsedConf::parse(conf).unwrap();
        let mut machine = fake::tests::machine(&["192.168.0.1/24", "fd00:1::1/64"]);
        let mut kernel = FakeKernel::new(machine.clone(), 90);
        for (name, port) in devices {
            let name = Name::new(name).unwrap();
            let (eth0, creator) = (machine.links[0].clone(), Creator::ThisAgent);
            machine.links.push(LinkInfo { index: 9, name, creator, ..eth0 });
            let kind = Arc::new(WireGuardLink { public: None, port: *port });
            let link = Link { kind, mtu: 1420, mac: None, up: true };
            kernel.apply(&[Op::Ensure(Key::Link(name), Value::link(link))]);
        }
        let (v4, v6) = (Some([192, 168, 0, 1].into()), "fd00:1::1".parse().ok());
        let uplink = Uplink { name: machine.links[0].name, mtu: 1500, v4, v6 };
        let host = Host { identities: KeyPair::of(Secret::new([1; 32])).both(), ..Host::new(uplink) };
        let kept = kept_ports(&mut kernel, &machine, &*conf.backend, &host);
        kept.into_iter().map(|(name, port)| (name.to_string(), port)).collect()
    }

    /// The first pass gives the other device that port, and a lease cannot name one port for two devices.
    #[test]
    fn a_port_that_another_device_has_in_net_conf_is_not_kept() {
        assert_eq!(kept(&[("flannel-wg", 51820)]), []);
        let both = [("flannel-wg", 51820), ("flannel-wg-v6", 51821)];
        assert_eq!(kept(&both), both.map(|(name, port)| (name.to_owned(), port)));
        assert_eq!(kept(&[("flannel-wg", 4777)]), [("flannel-wg".to_owned(), 4777)]);
        assert_eq!(kept(&[("flannel-wg", 4500)]), []);
    }
}
