// SPDX-License-Identifier: Apache-2.0
//! The net-conf of the cluster, as operators change it.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::chance::Chance;

/// A net-conf larger than this is refused.
const TOO_LARGE: usize = 70_000;

/// A change of net-conf that every node can follow while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Edit {
    /// Another type of backend.
    Backend(String),
    /// Another VNI, which counts with vxlan only.
    Vni(u32),
    /// A Network that contains the earlier one, or the earlier one again.
    Wide(bool),
}

/// A net-conf that no node may apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bad {
    /// The first character of the text is missing.
    NotJson,
    /// There is no backend of this type.
    UnknownType,
    /// It runs commands, and no node allows them.
    Commands,
    /// It is larger than any net-conf.
    TooLarge,
    /// All leases lie outside Network. A node that starts now takes a subnet there.
    OtherNetwork,
    /// The port of vxlan differs, and the name of the device does not. A node that starts now uses this port.
    OtherPort,
}

/// What the operator wants.
#[derive(Debug, Clone, PartialEq)]
pub struct WantedConf {
    /// The type of the backend.
    pub backend: String,
    /// The VNI of vxlan.
    pub vni: u32,
    /// Network is larger than at the beginning.
    pub wide: bool,
    /// The last subnet that nodes may choose.
    pub last: Ipv4Addr,
    /// What was written by mistake.
    pub bad: Option<Bad>,
}

impl WantedConf {
    /// Changes what the operator wants.
    pub fn edit(&mut self, edit: &Edit) {
        match edit {
            Edit::Backend(backend) => self.backend.clone_from(backend),
            Edit::Vni(vni) => self.vni = *vni,
            Edit::Wide(wide) => self.wide = *wide,
        }
    }

    /// Returns Network.
    pub fn network(&self) -> &'static str {
        if self.wide { "10.0.0.0/7" } else { "10.0.0.0/8" }
    }

    /// Returns the text in the store. Subnets are leased from the first part of Network only, so that the simulation has prefixes of its own.
    pub fn text(&self) -> String {
        let (network, last) = (self.network(), self.last);
        let backend = match self.backend.as_str() {
            "vxlan" => format!(r#"{{"Type":"vxlan","VNI":{}}}"#, self.vni),
            other => format!(r#"{{"Type":"{other}"}}"#),
        };
        let of = |network: &str, backend: &str, more: &str| {
            format!(
                r#"{{"Network":"{network}","SubnetLen":24,"SubnetMin":"10.1.0.0","SubnetMax":"{last}",{more}"Backend":{backend}}}"#
            )
        };
        match self.bad {
            None => of(network, &backend, ""),
            Some(Bad::NotJson) => of(network, &backend, "").split_off(1),
            Some(Bad::UnknownType) => of(network, r#"{"Type":"warp"}"#, ""),
            Some(Bad::Commands) => of(network, r#"{"Type":"extension","SubnetAddCommand":"true"}"#, ""),
            Some(Bad::TooLarge) => of(network, &backend, &format!(r#""Remark":"{}","#, "x".repeat(TOO_LARGE))),
            Some(Bad::OtherNetwork) => format!(r#"{{"Network":"172.16.0.0/12","Backend":{backend}}}"#),
            Some(Bad::OtherPort) => of(network, &format!(r#"{{"Type":"vxlan","VNI":{},"Port":8473}}"#, self.vni), ""),
        }
    }
}

/// Returns a random change. It is never one to wireguard, because a node that does not read the leases of the others for a tenth of
/// `--change-grace` may lose packets then, and agents are away for longer. With udp there are no packets while an agent is down.
pub fn random_edit(chance: &mut Chance) -> Edit {
    match chance.below(6) {
        0..3 => Edit::Backend(["vxlan", "host-gw", "ipip"][chance.below(3)].to_owned()),
        // Devices of other programs have the VNIs 2 and 7.
        3 | 4 => Edit::Vni([1, 3, 9][chance.below(3)]),
        _ => Edit::Wide(chance.percent(50)),
    }
}

/// Returns a random net-conf that no node may apply, also not at its start.
pub fn random_bad(chance: &mut Chance) -> Bad {
    [Bad::NotJson, Bad::UnknownType, Bad::Commands, Bad::TooLarge][chance.below(4)]
}

#[cfg(test)]
mod tests {
    use weft_subnet::net_conf::NetConf;

    use super::*;

    #[test]
    fn each_net_conf_is_what_its_name_says() {
        let good =
            WantedConf { backend: "vxlan".to_owned(), vni: 3, wide: false, last: [10, 63, 255, 0].into(), bad: None };
        let parsed = NetConf::parse(&good.text()).unwrap();
        assert_eq!((parsed.backend_type.as_str(), &*parsed.backend), ("vxlan", r#"{"Type":"vxlan","VNI":3}"#));
        let wide = NetConf::parse(&WantedConf { wide: true, ..good.clone() }.text()).unwrap();
        assert!(wide.networks.v4.unwrap().contains(&parsed.networks.v4.unwrap()));
        let bad = |bad| WantedConf { bad: Some(bad), ..good.clone() }.text();
        assert!(serde_json::from_str::<serde_json::Value>(&bad(Bad::NotJson)).is_err());
        assert!(bad(Bad::TooLarge).len() > TOO_LARGE);
        for readable in [Bad::UnknownType, Bad::Commands, Bad::OtherNetwork, Bad::OtherPort] {
            assert!(NetConf::parse(&bad(readable)).is_ok(), "{readable:?}");
        }
    }
}
