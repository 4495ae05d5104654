// SPDX-License-Identifier: Apache-2.0
//! Replaces routes of earlier versions by the fence.
//!
//! Earlier versions kept packets inside Network by two routes of the main table: `unreachable` for Network and `blackhole` for the own
//! subnet. These routes also apply to packets of the host. If the store has an address inside Network, the host may not reach it. So they
//! are replaced before the first request to the store.

use std::path::Path;

use weft_backends::diff::Op;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Fence, Key, Route, Value};
use weft_subnet::cidr::{Family, family};
use weft_subnet::env::SubnetEnv;

use crate::files;
use crate::kernel::{Kernel, Outcome};
use crate::options::Fences;

/// Replaces the routes that an agent with this subnet file left by the fences that are `wanted`. If that fails, the first pass does it.
pub fn replace(kernel: &mut impl Kernel, subnet_file: &Path, wanted: Fences) {
    let Some(env) = files::read_text(subnet_file).ok().and_then(|text| SubnetEnv::parse(&text)) else { return };
    let ops = match kernel.observe(&[]) {
        Ok(observed) => {
            let routes = observed.iter().filter(|(_, seen)| seen.protocol == PROTOCOL);
            operations(routes.map(|(key, seen)| (*key, seen.value.clone())), &env, wanted)
        }
        Err(error) => {
            return tracing::warn!(%error, "cannot look for routes of an earlier version: the first pass does it");
        }
    };
    if ops.is_empty() {
        return;
    }
    for (op, outcome) in ops.iter().zip(kernel.apply(&ops)) {
        match outcome {
            Outcome::Done => tracing::info!(%op, "replaced a route of an earlier version of weft by the fence"),
            Outcome::Retry(reason) | Outcome::Fatal(reason) | Outcome::Partly { missing: reason, .. } => {
                tracing::warn!(%op, reason, "cannot replace a route of an earlier version: the first pass tries again");
            }
        }
    }
}

/// Returns the operations that add the wanted fences and then remove the routes. Only routes that are there get a fence.
fn operations(routes: impl Iterator<Item = (Key, Value)>, env: &SubnetEnv, wanted: Fences) -> Vec<Op> {
    let mut removals = Vec::new();
    let mut fences = Family::BOTH.map(|family| (family, Fence { whole: true, ..Fence::default() }));
    for (key, value) in routes {
        let (Key::Route(net, _), Value::Route(route)) = (&key, &value) else { continue };
        let (net, route) = (*net, *route);
        let own = env.subnets.of(family(&net)).map(|own| own.trunc());
        let Some((_, fence)) = fences.iter_mut().find(|(of, _)| *of == family(&net)) else { continue };
        match route {
            Route::Unreachable if env.networks.of(family(&net)) == Some(net) => {
                fence.unreachable = Some(net).filter(|_| wanted.fail_closed);
            }
            Route::Blackhole if own == Some(net) => fence.blackhole = Some(net).filter(|_| wanted.blackhole),
            _ => continue,
        }
        removals.push(Op::Remove(key, value));
    }
    let fences = fences.into_iter().filter(|(_, fence)| fence.unreachable.is_some() || fence.blackhole.is_some());
    fences.map(|(family, fence)| Op::Ensure(Key::Fence(family), Value::fence(fence))).chain(removals).collect()
}

#[cfg(test)]
mod tests {
    use weft_backends::state::{LAST_METRIC, ObservedValue};
    use weft_subnet::cidr::Subnets;

    use super::*;
    use crate::kernel::fake::FakeKernel;
    use crate::kernel::fake::tests::machine;

    #[test]
    fn routes_of_this_agent_are_replaced_and_others_stay() {
        let route = |net: &str, route| (Key::Route(net.parse().unwrap(), LAST_METRIC), Value::Route(route));
        let subnets = |v4: &str| Subnets { v4: v4.parse().ok(), v6: None };
        let env =
            SubnetEnv { networks: subnets("10.5.0.0/16"), subnets: subnets("10.5.1.0/24"), mtu: 1450, ipmasq: false };
        let unreachable = route("10.5.0.0/16", Route::Unreachable);
        let blackhole = route("10.5.1.0/24", Route::Blackhole);
        let routes = [
            unreachable.clone(),
            blackhole.clone(),
            route("10.6.0.0/16", Route::Unreachable),
            route("10.5.2.0/24", Route::Unreachable),
            route("10.5.0.0/16", Route::Other),
        ];
        let text = |fail_closed, blackhole| {
            let ops = operations(routes.clone().into_iter(), &env, Fences { fail_closed, blackhole });
            ops.iter().map(Op::to_string).collect::<Vec<_>>()
        };
        let removals = [Op::Remove(unreachable.0, unreachable.1.clone()), Op::Remove(blackhole.0, blackhole.1.clone())]
            .map(|op| op.to_string());
        let fenced = |what: &str| [&[format!("add fence for forwarded IPv4 packets {what}")][..], &removals].concat();
        assert_eq!(text(true, false), fenced("unreachable 10.5.0.0/16"));
        assert_eq!(text(true, true), fenced("unreachable 10.5.0.0/16, blackhole 10.5.1.0/24"));
        assert_eq!(text(false, false), removals);
        assert_eq!(operations(std::iter::empty(), &env, Fences { fail_closed: true, blackhole: true }), []);
    }

    /// An administrator may keep packets inside Network in the same way.
    #[test]
    fn routes_of_other_programs_stay_and_without_a_subnet_file_all_do() {
        let dir = tempfile::tempdir().unwrap();
        let subnet_file = dir.path().join("subnet.env");
        let key = |net: &str| Key::Route(net.parse().unwrap(), LAST_METRIC);
        let kernel = || {
            let kernel = FakeKernel::new(machine(&["192.168.0.1/24"]), PROTOCOL);
            for (net, route, protocol) in
                [("10.5.0.0/16", Route::Unreachable, PROTOCOL), ("10.5.1.0/24", Route::Blackhole, 4)]
            {
                let seen = ObservedValue { value: Value::Route(route), protocol, mark: false };
                kernel.disturb(key(net), Some(seen), false);
            }
            kernel
        };
        let (mut unknown, mut ours) = (kernel(), kernel());
        let wanted = Fences { fail_closed: true, blackhole: true };
        replace(&mut unknown, &subnet_file, wanted);
        assert_eq!(unknown.take_ops(), []);
        let env = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";
        std::fs::write(&subnet_file, env).unwrap();
        replace(&mut ours, &subnet_file, wanted);
        let there = ours.entries();
        assert!(!there.contains_key(&key("10.5.0.0/16")) && there.contains_key(&key("10.5.1.0/24")), "{there:?}");
        let fence = there.get(&Key::Fence(Family::V4)).map(|seen| seen.value.to_string());
        assert_eq!(fence.as_deref(), Some("unreachable 10.5.0.0/16"));
    }
}
