// SPDX-License-Identifier: Apache-2.0
//! How the links of weft, of pods and of kube-proxy are known.

use weft_backends::owner;
use weft_cni::veth;
use weft_netlink::rtnl::Link;

use crate::finding::counted;

/// The bridge of flannel's CNI plugin.
pub const BRIDGE: &str = "cni0";
/// The link to which kube-proxy gives the addresses of services, if IPVS carries them.
pub(crate) const KUBE_IPVS: &str = "kube-ipvs0";

/// Returns the bridge of the pods, if there is one.
pub(crate) fn bridge(links: &[Link]) -> Option<&Link> {
    links.iter().find(|link| link.name == BRIDGE && link.kind == "bridge")
}

/// Returns true for a device that weft or flannel made.
pub(crate) fn is_ours(link: &Link) -> bool {
    link.alias.starts_with(owner::ALIAS) || link.name.starts_with("flannel")
}

/// Returns true for the link of a routed pod, which the CNI plugin of weft made.
pub(crate) fn is_of_routed_pod(link: &Link) -> bool {
    link.alias.split(' ').next() == Some(veth::ALIAS)
}

/// Returns a number of ports of the bridge, with the verb for one port or for several.
pub(crate) fn ports_that(number: usize, one: &str, more: &str) -> String {
    counted(number, &format!("port of {BRIDGE} {one}"), &format!("ports of {BRIDGE} {more}"))
}
