// SPDX-License-Identifier: Apache-2.0
//! The identity of a vxlan device: its MAC, which is VtepMAC in leases.

use std::io;
use std::sync::Arc;

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::PublicIdentity;
use weft_subnet::cidr::Family;

use super::KIND;
use crate::host::Host;
use crate::identity::{Found, Identities, Identity};
use crate::options::Members;
use crate::state::Mac;

/// The identity of a vxlan device. The kernel keeps it, as the device's address. Peers learn it from our lease, so a device that is
/// made again gets the MAC that the lease names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VtepMac(pub Mac);

impl Identity for VtepMac {
    fn public(&self) -> PublicIdentity {
        PublicIdentity::new(KIND, self.0)
    }

    fn name(&self) -> &'static str {
        "VtepMAC"
    }

    fn remedy(&self) -> &'static str {
        VtepMac::REMEDY
    }
}

impl VtepMac {
    /// What a person must do on a copy of a machine.
    pub const REMEDY: &'static str = "delete flannel's device and restart the agent";

    /// Returns the identities of two devices with these MACs.
    pub fn both(v4: Mac, v6: Mac) -> Identities {
        let identity = |mac| Some(Arc::new(VtepMac(mac)) as Arc<dyn Identity>);
        Identities::new(identity(v4), identity(v6))
    }

    /// Returns a random address that is unicast and locally administered.
    pub(super) fn random(found: &Found<'_>) -> io::Result<VtepMac> {
        let mut mac = [0; 6];
        (found.random)(&mut mac)?;
        mac[0] = (mac[0] & 0xfc) | 0x02;
        Ok(VtepMac(Mac(mac)))
    }
}

/// Returns the MAC of our vxlan device of this family. `None` if the network has another backend. Then the plans of peers contain the
/// device, no lease names its MAC, and the kernel chooses it.
pub(super) fn vtep_mac(host: &Host, family: Family) -> Option<Mac> {
    host.identities.of(family)?.of::<VtepMac>().map(|identity| identity.0)
}

/// Returns the MACs that a lease names for the IPv4 device and the IPv6 device. One that no device can have is left out. A lease of another
/// type names none, because its data have another meaning.
pub(super) fn lease_macs(attrs: &Attrs) -> [Option<Mac>; 2] {
    if attrs.backend_type != KIND {
        return [None, None];
    }
    let mac = |data: &Option<Box<str>>| {
        let members: Members = serde_json::from_str(data.as_deref()?).ok()?;
        let mac = parse_mac(members.get("VtepMAC")?.as_str()?)?;
        (!mac.is_zero() && !mac.is_multicast()).then_some(mac)
    };
    [mac(&attrs.backend_data), mac(&attrs.backend_v6_data)]
}

/// Parses a MAC in any notation that Go's net.ParseMAC reads: `02:00:00:00:00:01`, `02-00-00-00-00-01` or `0200.0000.0001`.
pub fn parse_mac(text: &str) -> Option<Mac> {
    let separator = text.chars().find(|c| !c.is_ascii_hexdigit())?;
    let width = match separator {
        ':' | '-' => 2,
        '.' => 4,
        _ => return None,
    };
    let groups: Vec<&str> = text.split(separator).collect();
    let is_group = |group: &&str| group.len() == width && group.bytes().all(|b| b.is_ascii_hexdigit());
    if groups.len() * width != 12 || !groups.iter().all(is_group) {
        return None;
    }
    let number = u64::from_str_radix(&groups.concat(), 16).ok()?;
    let [_, _, mac @ ..] = number.to_be_bytes();
    Some(Mac(mac))
}

#[cfg(test)]
mod tests {
    use super::{Found, Mac, VtepMac, io, parse_mac};
    use crate::extension::tests::NoFiles;

    #[test]
    fn macs_as_go_reads_them() {
        let mac = Mac([0xc6, 0xd2, 0x32, 0x6f, 0x8f, 0x44]);
        for text in ["c6:d2:32:6f:8f:44", "C6-D2-32-6F-8F-44", "c6d2.326f.8f44"] {
            assert_eq!(parse_mac(text), Some(mac), "{text}");
        }
        for text in [
            "",
            "c6d2326f8f44",
            "c6:d2:32:6f:8f",
            "c6:d2:32:6f:8f:4",
            "c6:d2-32:6f:8f:44",
            "c6:d2:32:6f:8f:44:00:01",
            "+6:d2:32:6f:8f:44",
        ] {
            assert_eq!(parse_mac(text), None, "{text}");
        }
    }

    /// The kernel refuses a device with the address of a group, and the address of a manufacturer may be that of another host. Without random
    /// numbers, all nodes would choose the same address.
    #[test]
    fn a_random_mac_is_of_one_host_and_locally_administered() {
        let random = |random: &dyn Fn(&mut [u8]) -> io::Result<()>| {
            let found = Found { links: &[], secrets: &NoFiles, random, printed: None };
            VtepMac::random(&found).map(|mac| mac.0)
        };
        let of = |byte: u8| {
            let fill = |buffer: &mut [u8]| {
                buffer.fill(byte);
                Ok(())
            };
            random(&fill).unwrap()
        };
        assert_eq!(of(0), Mac([2, 0, 0, 0, 0, 0]));
        assert_eq!(of(0xff), Mac([0xfe, 0xff, 0xff, 0xff, 0xff, 0xff]));
        assert!(random(&|_: &mut [u8]| Err(io::ErrorKind::Unsupported.into())).is_err());
    }
}
