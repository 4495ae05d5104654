// SPDX-License-Identifier: Apache-2.0
//! Which of Kubernetes' network tests are run, and why the others are not.

use clap::ValueEnum;

use crate::cluster::Family;

/// A choice of tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Selection {
    /// All of `[sig-network]` that a cluster without a cloud can pass.
    All,
    /// A part of them that takes at most four minutes.
    Short,
    /// The tests of NetworkPolicy. No program enforces policies here, so the tests of enforcement are expected to fail.
    Netpol,
}

/// A tag or a part of a name by which tests are left out, and the reason for people.
pub struct LeftOut {
    pub name: &'static str,
    pub reason: &'static str,
}

/// The tests that no cluster of the matrix can run.
const ALWAYS: [LeftOut; 15] = [
    LeftOut { name: "[Feature:LoadBalancer]", reason: "needs the load balancer of a cloud" },
    LeftOut { name: "[Feature:Ingress]", reason: "needs an Ingress controller" },
    LeftOut {
        name: "[Feature:NetworkPolicy]",
        reason: "needs a policy engine; `CONFORMANCE_ARGS='--tests netpol'` runs them",
    },
    LeftOut { name: "[Feature:SCTPConnectivity]", reason: "needs the sctp module in the kernel" },
    LeftOut { name: "[Feature:KubeProxyDaemonSet", reason: "needs kube-proxy as a DaemonSet" },
    LeftOut { name: "[Feature:KubeProxyNFAcct]", reason: "needs the nfacct module in the kernel" },
    LeftOut { name: "[Feature:Networking-DNS]", reason: "needs the internet" },
    LeftOut { name: "[Feature:Networking-IPv4]", reason: "needs the internet" },
    LeftOut { name: "[Feature:Networking-IPv6]", reason: "needs the internet" },
    // This test looks up the name of 8.8.8.8 before it begins.
    LeftOut { name: "should forward PTR records lookup to upstream nameserver", reason: "needs the internet" },
    LeftOut { name: "[Feature:Networking-Performance]", reason: "measures, and promises nothing" },
    LeftOut { name: "[Feature:PerformanceDNS]", reason: "measures a DNS server with thousands of Services" },
    LeftOut { name: "[Feature:OffByDefault]", reason: "needs feature gates that are off by default" },
    LeftOut { name: "[Disruptive]", reason: "restarts parts of the control plane over ssh" },
    LeftOut { name: "[Alpha]", reason: "needs feature gates that are off by default" },
];

/// The tests that need two families.
const TWO_FAMILIES: LeftOut =
    LeftOut { name: "[Feature:IPv6DualStack]", reason: "needs a cluster of two families; it runs in those" };

/// A test that is known to fail, and the reason.
pub struct Known {
    pub name: &'static str,
    /// The `Backend.Type` with which it fails. It passes with the others.
    pub backend: &'static str,
    pub reason: &'static str,
}

/// Tests that fail with flannel, too.
pub const KNOWN: [Known; 1] = [Known {
    name: "should implement NodePort and HealthCheckNodePort correctly when ExternalTrafficPolicy changes",
    backend: "vxlan",
    reason: "a NodePort that is reached from its own node is masqueraded with the address of the tunnel device, as with flannel",
}];

/// A few tests of each kind: pods, Services, DNS, host ports, session affinity.
const SHORT: [&str; 8] = [
    r"Granular Checks: Pods .*should function for (intra-pod|node-pod) communication: (http|udp) \[",
    r"Services should serve a basic endpoint from pods",
    r"Services should be able to change the type from ExternalName to NodePort",
    r"Services should have session affinity work for NodePort service \[LinuxOnly\] \[Conformance\]",
    r"DNS should provide DNS for services",
    r"HostPort validates that there is no conflict",
    r"Service endpoints latency should not be very high",
    r"EndpointSlice should create Endpoints and EndpointSlices for Pods matching a Service",
];

impl Selection {
    /// Returns regular expressions. A test must match at least one of them.
    pub fn focus(self) -> Vec<String> {
        match self {
            Selection::All => vec![r"\[sig-network\]".to_owned()],
            Selection::Short => SHORT.iter().map(|name| format!(r"\[sig-network\].*{name}")).collect(),
            Selection::Netpol => vec![r"\[sig-network\] Netpol".to_owned()],
        }
    }

    /// Returns the tests that are left out in a cluster of this family.
    pub fn left_out(self, family: Family) -> Vec<&'static LeftOut> {
        match self {
            Selection::Netpol => Vec::new(),
            _ if family == Family::Dual => ALWAYS.iter().collect(),
            _ => ALWAYS.iter().chain([&TWO_FAMILIES]).collect(),
        }
    }
}

/// Returns a regular expression that matches this text and nothing else.
pub fn quoted(text: &str) -> String {
    let special = |c: char| r"\.+*?()|[]{}^$".contains(c);
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}
