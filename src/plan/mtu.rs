// SPDX-License-Identifier: Apache-2.0
//! The MTU of pods, and subnet.env, which names it.

use std::collections::BTreeSet;

use weft_subnet::cidr::{Family, family};
use weft_subnet::env::SubnetEnv;

use super::Plan;

impl Plan {
    /// Returns the smallest MTU of all families and backends in use, in bytes.
    pub fn mtu(&self) -> u32 {
        let families: Vec<Family> = self.own.subnets.iter().map(|net| family(&net)).collect();
        let kinds: BTreeSet<&'static str> = self.foreign.values().copied().collect();
        let others = kinds.into_iter().filter_map(|kind| self.others.made(kind));
        let backends = std::iter::once(&*self.backend).chain(others).map(|backend| (backend, &self.host));
        backends
            .chain(self.besides.used())
            .flat_map(|(backend, host)| families.iter().map(|family| backend.mtu(host, *family)))
            .min()
            .unwrap_or(self.host.uplink.mtu)
    }

    /// Returns the content of subnet.env. `ipmasq` is always false, because the plan does not know whether traffic rules are in place.
    pub fn env(&self) -> SubnetEnv {
        SubnetEnv { networks: self.network.networks, subnets: self.own.subnets, mtu: self.mtu(), ipmasq: false }
    }
}
