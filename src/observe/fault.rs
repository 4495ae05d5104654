// SPDX-License-Identifier: Apache-2.0
//! Faults: what can be wrong with this node itself, whatever the store and the peers do.

/// The kind of a fault of this node. All faults of one kind have one Event, whatever their texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// The node has no lease, because something that it needs is missing.
    NoLease,
    /// The own device carries no packets.
    Device,
    /// The kernel does not answer, or lacks something.
    Kernel,
    /// subnet.env cannot be written.
    SubnetFile,
    /// The traffic rules are not in place.
    TrafficRules,
    /// The uplink cannot be used.
    Uplink,
    /// Another node owns the subnet.
    LeaseLost,
    /// The own lease is missing from the store.
    LeaseMissing,
    /// Another agent writes the own lease again and again.
    LeaseContested,
    /// The tunnel of the backend udp does not run.
    Tunnel,
    /// A command of the backend extension failed.
    Extension,
}

impl FaultKind {
    /// Returns the reason of the Event.
    pub(super) fn reason(self) -> &'static str {
        match self {
            FaultKind::NoLease => "NoLease",
            FaultKind::Device => "DeviceFault",
            FaultKind::Kernel => "KernelFault",
            FaultKind::SubnetFile => "SubnetFileFault",
            FaultKind::TrafficRules => "TrafficRulesFault",
            FaultKind::Uplink => "UplinkFault",
            FaultKind::LeaseLost => "LeaseLost",
            FaultKind::LeaseMissing => "LeaseMissing",
            FaultKind::LeaseContested => "LeaseContested",
            FaultKind::Tunnel => "TunnelFault",
            FaultKind::Extension => "ExtensionFault",
        }
    }
}

/// A fault of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Its kind.
    pub kind: FaultKind,
    /// What is wrong, in one sentence.
    pub text: String,
}
