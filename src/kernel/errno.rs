// SPDX-License-Identifier: Apache-2.0
//! What an errno means for an operation. For WireGuard devices, [`super::wireguard::WireGuardError`] names what their errnos mean, and
//! `super::wireguard_peers` decides what follows for an operation.

use std::fmt::Write;

use nix::errno::Errno;
use weft_backends::diff::Op;
use weft_backends::state::{Key, Route, Value};

use super::Outcome;
use super::socket::Refusal;

/// What an errno means for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The entry is nevertheless as wanted.
    Done,
    /// The operation may succeed later.
    Retry,
    /// The operation will not succeed by trying again.
    Fatal,
}

/// Returns the meaning of a refusal. `explanation` is the text of the kernel. It is needed because the kernel also answers EINVAL in
/// cases that pass.
pub fn meaning(op: &Op, errno: Errno, explanation: &str) -> Meaning {
    let (removal, key) = match op {
        Op::Remove(key, _) => (true, key),
        Op::Ensure(key, _) | Op::Recreate(key, _) => (false, key),
    };
    match errno {
        // The entry, or the device under it, is gone already.
        Errno::ENOENT | Errno::ESRCH | Errno::ENODEV | Errno::ENXIO | Errno::EADDRNOTAVAIL if removal => Meaning::Done,
        // A route is removed by the id of its nexthop. The kernel has removed both if the device is gone.
        Errno::EINVAL if removal && explanation.contains("id does not exist") => Meaning::Done,
        Errno::EEXIST if matches!(key, Key::Addr(..)) => Meaning::Done,
        // Another program has created a link or route there, or deleted it. The next observation shows it.
        Errno::EEXIST | Errno::ENOENT | Errno::ESRCH => Meaning::Retry,
        // ENETDOWN: the device is down, or it has no carrier (nexthops). ENETUNREACH: the gateway is not on the link yet.
        Errno::ENODEV | Errno::ENXIO | Errno::ENETDOWN | Errno::ENETUNREACH | Errno::EHOSTUNREACH => Meaning::Retry,
        Errno::EADDRNOTAVAIL | Errno::ENONET => Meaning::Retry,
        Errno::ENOBUFS | Errno::ENOMEM | Errno::EAGAIN | Errno::EBUSY | Errno::EINTR => Meaning::Retry,
        // The device or the nexthop was deleted after its index or id was read.
        Errno::EINVAL if explanation.contains("device index") || explanation.contains("id does not exist") => {
            Meaning::Retry
        }
        _ => Meaning::Fatal,
    }
}

/// Returns true if IPv6 refused an on-link gateway because another route reaches it over another device
/// (`ip6_route_check_nh_onlink` in net/ipv6/route.c). The gateway of a tunnel route is an address in the peer's subnet, so a route to
/// that subnet over another device has this effect.
pub fn is_gateway_elsewhere(refusal: &Refusal) -> bool {
    refusal.errno == Errno::EINVAL && refusal.text.contains("device mismatch")
}

/// Returns the outcome of a refused operation, with a text for people.
pub fn outcome(op: &Op, refusal: &Refusal) -> Outcome {
    let explanation = refusal.text.as_str();
    let mut cause = format!("{:?}, {}", refusal.errno, refusal.errno.desc());
    if !explanation.is_empty() {
        let _ = write!(cause, " ({explanation})");
    }
    if let (Errno::EOPNOTSUPP, Op::Ensure(_, Value::Link(link)) | Op::Recreate(_, Value::Link(link))) =
        (refusal.errno, op)
    {
        let kind = link.kind.name();
        let _ = write!(
            cause,
            "; if this kernel has no devices of the type {kind}, load its module {kind} on the host, or choose another backend"
        );
    }
    if refusal.errno == Errno::EPERM {
        cause.push_str(
            "; weft needs CAP_NET_ADMIN: run it as root, or add NET_ADMIN to the capabilities of its container or unit",
        );
    }
    match meaning(op, refusal.errno, explanation) {
        Meaning::Done => Outcome::Done,
        Meaning::Retry => Outcome::Retry(format!("{}: {cause}", describe(op))),
        Meaning::Fatal => Outcome::Fatal(format!("{}: {cause}", describe(op))),
    }
}

/// Returns the outcome of an operation that the agent itself puts off.
pub fn retry(op: &Op, cause: &str) -> Outcome {
    Outcome::Retry(format!("{}: {cause}", describe(op)))
}

/// Returns the outcome of a route in whose place the kernel has a route for an address of this host. Such a route is never replaced:
/// it would still be missing after ours is removed, and the host would not reach its own network.
pub fn kernels_own(op: &Op) -> Outcome {
    fatal(
        op,
        "the kernel has its own route to a directly connected network there, and weft never replaces such a route",
    )
}

/// Returns the outcome of an operation that the agent itself refuses.
pub fn fatal(op: &Op, cause: &str) -> Outcome {
    Outcome::Fatal(format!("{}: {cause}", describe(op)))
}

/// Describes an operation and its object in the words of `ip`.
pub fn describe(op: &Op) -> String {
    let (verb, key, value) = match op {
        Op::Ensure(key, value) => ("set", key, value),
        Op::Recreate(key, value) => ("re-create", key, value),
        Op::Remove(key, value) => ("remove", key, value),
    };
    match (key, value) {
        (Key::Link(name), _) => format!("{verb} link {name}"),
        (Key::Addr(name, net), _) => format!("{verb} address {net} dev {name}"),
        (Key::Fdb(name, mac), Value::Fdb(dst)) => format!("{verb} fdb {mac} dst {dst} dev {name}"),
        (Key::Fdb(name, mac), _) => format!("{verb} fdb {mac} dev {name}"),
        (Key::Neigh(name, ip), Value::Neigh(mac)) => format!("{verb} neighbour {ip} lladdr {mac} dev {name}"),
        (Key::Neigh(name, ip), _) => format!("{verb} neighbour {ip} dev {name}"),
        (Key::Route(net, metric), value) => format!("{verb} {}", route(*net, *metric, value)),
        (Key::WgPeer(..) | Key::AllowedIp(..), _) => format!("{verb} {key}"),
        (Key::Peer(_) | Key::Guard(_) | Key::Open(_) | Key::Fence(_), _) => format!("{verb} {key}"),
    }
}

fn route(net: ipnet::IpNet, metric: u32, value: &Value) -> String {
    let mut text = match value {
        Value::Route(Route::Unicast { via, dev, onlink }) => {
            format!("route {net} via {via} dev {dev}{}", if *onlink { " onlink" } else { "" })
        }
        Value::Route(Route::Device { dev }) => format!("route {net} dev {dev}"),
        Value::Route(Route::Blackhole) => format!("route blackhole {net}"),
        Value::Route(Route::Unreachable) => format!("route unreachable {net}"),
        _ => format!("route {net}"),
    };
    if metric != 0 {
        let _ = write!(text, " metric {metric}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use weft_backends::ipip::IpipLink;
    use weft_backends::link::Link;
    use weft_backends::state::{Mac, Name};

    fn route_op(removal: bool) -> Op {
        let dev = Name::new("flannel.1").unwrap();
        let key = Key::Route("10.1.2.0/24".parse().unwrap(), 0);
        let value = Value::Route(Route::Unicast { via: "10.1.2.0".parse().unwrap(), dev, onlink: true });
        if removal { Op::Remove(key, value) } else { Op::Ensure(key, value) }
    }

    #[test]
    fn each_errno_has_one_meaning() {
        let rows = [
            ("gone before removal", true, Errno::ESRCH, "", Meaning::Done),
            ("device gone before removal", true, Errno::ENODEV, "", Meaning::Done),
            ("device gone before add", false, Errno::ENODEV, "", Meaning::Retry),
            ("device gone before the entry is added", false, Errno::ENXIO, "", Meaning::Retry),
            ("no carrier", false, Errno::ENETDOWN, "Carrier for nexthop device is down", Meaning::Retry),
            ("gateway not on link", false, Errno::ENETUNREACH, "", Meaning::Retry),
            ("no memory", false, Errno::ENOBUFS, "", Meaning::Retry),
            ("forbidden", false, Errno::EPERM, "", Meaning::Fatal),
            ("forbidden removal", true, Errno::EPERM, "", Meaning::Fatal),
            ("not supported", false, Errno::EOPNOTSUPP, "", Meaning::Fatal),
            ("invalid", false, Errno::EINVAL, "", Meaning::Fatal),
            ("index gone", false, Errno::EINVAL, "Invalid device index", Meaning::Retry),
            ("nexthop gone", false, Errno::EINVAL, "Nexthop id does not exist", Meaning::Retry),
            ("nexthop gone before removal", true, Errno::EINVAL, "Nexthop id does not exist", Meaning::Done),
        ];
        for (name, removal, errno, explanation, want) in rows {
            assert_eq!(meaning(&route_op(removal), errno, explanation), want, "{name}");
        }
    }

    #[test]
    fn the_text_names_the_operation_its_object_the_cause_and_the_explanation_of_the_kernel() {
        let refusal =
            Refusal { seq: 1, errno: Errno::ENETDOWN, code: Errno::ENETDOWN as i32, text: "Carrier is down".into() };
        assert_eq!(
            outcome(&route_op(false), &refusal),
            Outcome::Retry(
                "set route 10.1.2.0/24 via 10.1.2.0 dev flannel.1 onlink: ENETDOWN, Network is down (Carrier is down)"
                    .into()
            )
        );
        let key = Key::Fdb(Name::new("flannel.1").unwrap(), Mac([2, 0, 0, 0, 0, 1]));
        let op = Op::Remove(key, Value::Fdb("10.0.0.1".parse().unwrap()));
        assert_eq!(describe(&op), "remove fdb 02:00:00:00:00:01 dst 10.0.0.1 dev flannel.1");
    }

    /// What passes by itself is tried again, and an address that is there already is what was wanted.
    #[test]
    fn what_may_pass_is_tried_again() {
        let address = |removal: bool| {
            let key = Key::Addr(Name::new("flannel.1").unwrap(), "10.1.0.0/32".parse().unwrap());
            if removal { Op::Remove(key, Value::Addr) } else { Op::Ensure(key, Value::Addr) }
        };
        for (op, errno, want) in [
            (address(false), Errno::EEXIST, Meaning::Done),
            (address(true), Errno::EADDRNOTAVAIL, Meaning::Done),
            (address(true), Errno::ENXIO, Meaning::Done),
            (address(false), Errno::EADDRNOTAVAIL, Meaning::Retry),
            (route_op(false), Errno::EEXIST, Meaning::Retry),
            (route_op(false), Errno::ENOENT, Meaning::Retry),
            (route_op(true), Errno::ENOENT, Meaning::Done),
            (route_op(true), Errno::EBUSY, Meaning::Retry),
        ] {
            assert_eq!(meaning(&op, errno, ""), want, "{op:?} {errno}");
        }
        for errno in [Errno::EHOSTUNREACH, Errno::ENONET, Errno::ENOMEM, Errno::EAGAIN, Errno::EBUSY, Errno::EINTR] {
            assert_eq!(meaning(&route_op(false), errno, ""), Meaning::Retry, "{errno}");
        }
    }

    #[test]
    fn a_refusal_that_a_person_can_mend_names_the_remedy() {
        let said =
            |op: &Op, errno| match outcome(op, &Refusal { seq: 1, errno, code: errno as i32, text: String::new() }) {
                Outcome::Fatal(text) => text,
                other => panic!("{other:?}"),
            };
        let kind = Arc::new(IpipLink { local: "10.0.0.1".parse().unwrap(), bound: false });
        let link = Value::link(Link { kind, mtu: 1480, mac: None, up: true });
        let device = Op::Ensure(Key::Link(Name::new("flannel.ipip").unwrap()), link);
        let text = said(&device, Errno::EOPNOTSUPP);
        assert!(text.contains("load its module ipip"), "{text}");
        let text = said(&route_op(false), Errno::EOPNOTSUPP);
        assert!(!text.contains("module"), "{text}");
        let text = said(&route_op(false), Errno::EPERM);
        assert!(text.contains("CAP_NET_ADMIN"), "{text}");
    }

    #[test]
    fn only_a_gateway_that_another_route_reaches_elsewhere_is_one() {
        let refusal = |errno, text: &str| Refusal { seq: 1, errno, code: errno as i32, text: text.into() };
        let device = "Nexthop has invalid gateway or device mismatch";
        assert!(is_gateway_elsewhere(&refusal(Errno::EINVAL, device)));
        assert!(!is_gateway_elsewhere(&refusal(Errno::EEXIST, device)));
        assert!(!is_gateway_elsewhere(&refusal(Errno::EINVAL, "Invalid prefix")));
    }
}
