// SPDX-License-Identifier: Apache-2.0
//! Routes to all of Network, while peers are reached by several backends (docs/adr/020-live-change.md).
//!
//! wireguard and udp each have one such route to their device instead of one for each peer. The kernel has one route for each prefix and
//! metric, so beside another backend each peer needs a longer route that does not depend on it. Beside a backend that makes no routes, packets
//! to peers may take the default route. So there is no route to all of Network then, for some time.

use ipnet::IpNet;
use weft_backends::state::{Key, Name, Route, State, Value, metric};
use weft_subnet::cidr::family;
use weft_subnet::lease::Lease;

use super::extra_backends::Which;

/// The routes to all of Network. Most backends have none.
pub(super) struct WideRoutes {
    all: Vec<WideRoute>,
    /// None of these routes stands, because packets to peers may take the default route.
    are_left_out: bool,
}

/// A route to all of Network.
struct WideRoute {
    /// The backend whose device it leads to.
    backend: Which,
    net: IpNet,
    device: Name,
}

/// Returns the prefix and the device of a route to all of Network, if this entry of a device is one.
fn wide(key: &Key, value: &Value) -> Option<(IpNet, Name)> {
    match (key, value) {
        (Key::Route(net, _), Value::Route(Route::Device { dev })) => Some((*net, *dev)),
        _ => None,
    }
}

impl WideRoutes {
    /// Returns the wide routes among the devices of each backend, with their entries.
    pub(super) fn of(devices: impl Iterator<Item = (Which, State)>, are_left_out: bool) -> WideRoutes {
        let mut all = Vec::new();
        for (backend, state) in devices {
            let routes = state.iter().filter_map(|(key, value)| wide(key, value));
            all.extend(routes.map(|(net, device)| WideRoute { backend, net, device }));
        }
        WideRoutes { all, are_left_out }
    }

    /// Returns the routes that this backend needs to a peer because another backend has a route to all of Network, too.
    pub(super) fn to_peer(&self, backend: Which, lease: &Lease) -> Vec<(IpNet, Name)> {
        let (ours, others): (Vec<_>, Vec<_>) = self.all.iter().partition(|route| route.backend == backend);
        let is_contested = |route: &&WideRoute| {
            let by_other = |other: &&WideRoute| other.net == route.net && other.device != route.device;
            self.are_left_out || others.iter().any(by_other)
        };
        let contested = ours.into_iter().filter(is_contested);
        contested.filter_map(|route| Some((lease.subnets.of(family(&route.net))?, route.device))).collect()
    }
}

/// Removes the routes to all of Network from the entries of devices.
pub(super) fn leave_out(devices: &mut State) {
    devices.retain(|key, value| wide(key, value).is_none());
}

/// Adds routes to devices, where a state has no route to the same network.
pub(super) fn insert(state: &mut State, routes: impl IntoIterator<Item = (IpNet, Name)>) {
    for (net, dev) in routes {
        let key = Key::Route(net, metric(family(&net)));
        if state.get(&key).is_none() {
            state.insert(key, Value::Route(Route::Device { dev }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_that_is_there_already_stays_as_it_is() {
        let [dev, other] = ["flannel-wg", "eth0"].map(|name| Name::new(name).unwrap());
        let [there, new]: [IpNet; 2] = ["10.5.2.0/24", "10.5.3.0/24"].map(|net| net.parse().unwrap());
        let key = |net: IpNet| Key::Route(net, metric(family(&net)));
        let via = Value::Route(Route::Unicast { via: "192.168.0.2".parse().unwrap(), dev: other, onlink: false });
        let mut state = State::from([(key(there), via.clone())]);
        insert(&mut state, [(there, dev), (new, dev)]);
        assert_eq!(state, State::from([(key(there), via), (key(new), Value::Route(Route::Device { dev }))]));
    }
}
