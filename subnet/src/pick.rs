// SPDX-License-Identifier: Apache-2.0
//! Choice of a free subnet: pure, chance is an input (flannel-compat.md section 1, acquire order 3).

use crate::cidr::Subnets;
use crate::network::Network;

/// Up to 100 free subnets of each family between SubnetMin and SubnetMax, one of each chosen by `random` (any 64 bits,
/// called once a family). `None` when a family that is on has none left. `taken`: all subnets leased now.
pub fn pick(network: &Network, taken: &[Subnets], random: &mut dyn FnMut() -> u64) -> Option<Subnets> {
    let _ = (network, taken, random);
    None
}

/// True when this subnet has the right length, lies between SubnetMin and SubnetMax and has exactly the families that are on.
pub fn compatible(network: &Network, subnets: &Subnets) -> bool {
    let _ = (network, subnets);
    false
}
