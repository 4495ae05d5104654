// SPDX-License-Identifier: Apache-2.0
//! The MTU of pods, and subnet.env, which names it.

use weft_subnet::cidr::{Family, family};
use weft_subnet::env::SubnetEnv;

use super::Plan;

impl Plan {
    /// Returns the smallest MTU of all families and backends in use, in bytes.
    pub fn mtu(&self) -> u32 {
        let families: Vec<Family> = self.own.subnets.iter().map(|net| family(&net)).collect();
        let others = self.other_types.kinds().filter_map(|kind| self.other_backends.get(kind));
        let backends = std::iter::once(&*self.backend).chain(others).map(|backend| (backend, &self.host));
        backends
            .chain(self.extra_backends.used())
            .flat_map(|(backend, host)| families.iter().map(|family| backend.mtu(host, *family)))
            .min()
            .unwrap_or(self.host.uplink.mtu)
    }

    /// Returns the MTU of the underlay that counts for our backend, in bytes.
    pub fn underlay_mtu(&self) -> u32 {
        self.backend.underlay_mtu(&self.host)
    }

    /// Returns the content of subnet.env. `ipmasq` is always false, because the plan does not know whether traffic rules are in place.
    pub fn env(&self) -> SubnetEnv {
        SubnetEnv { networks: self.net_conf.networks, subnets: self.own.subnets, mtu: self.mtu(), ipmasq: false }
    }
}
