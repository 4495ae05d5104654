// SPDX-License-Identifier: Apache-2.0
//! Links and addresses, one by one: rare work, each step depends on the answer to the one before.

use std::io;

use nix::libc;
use weft_backends::diff::Op;
use weft_backends::state::{Key, Link, LinkKind, Name, Value};

use super::decode::{self, LinkFacts, Tunnel};
use super::encode;
use super::linux::LinuxKernel;
use super::rt::{PLAIN, ifinfomsg};
use super::wire::{Writer, messages};
use super::{Outcome, errno, sysctl};

/// A step that ended the work: with its outcome.
type Stop = Outcome;

impl LinuxKernel {
    /// The link of this name, if there is one.
    pub(super) fn find_link(&mut self, name: Name) -> io::Result<Option<LinkFacts>> {
        let answer = self.netlink.request(|w| {
            w.begin(libc::RTM_GETLINK, PLAIN, &ifinfomsg(0, 0, 0));
            w.attr_str(libc::IFLA_IFNAME, name.as_str());
        })?;
        match answer {
            Ok(data) => {
                Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWLINK).find_map(|m| decode::link(m.payload)))
            }
            Err(refusal) if refusal.errno == nix::errno::Errno::ENODEV => Ok(None),
            Err(refusal) => Err(refusal.errno.into()),
        }
    }

    /// One operation on a link or an address.
    pub(super) fn apply_one(&mut self, op: &Op) -> Outcome {
        let done = match *op {
            Op::Ensure(Key::Link(name), Value::Link(link)) => self.ensure_link(op, name, &link),
            Op::Recreate(Key::Link(name), Value::Link(link)) => {
                self.remove_link(op, name).and_then(|()| self.create_link(op, name, &link))
            }
            Op::Remove(Key::Link(name), _) => self.remove_link(op, name),
            Op::Ensure(Key::Addr(name, net), _) | Op::Recreate(Key::Addr(name, net), _) => {
                self.address(op, name, |w, index| encode::address(w, true, index, net))
            }
            Op::Remove(Key::Addr(name, net), _) => {
                self.address(op, name, |w, index| encode::address(w, false, index, net))
            }
            _ => Err(errno::fatal(op, "the value does not fit the key")),
        };
        done.err().unwrap_or(Outcome::Done)
    }

    fn send(&mut self, op: &Op, build: impl FnOnce(&mut Writer)) -> Result<(), Stop> {
        match self.netlink.request(build) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(refusal)) => match errno::outcome(op, &refusal) {
                Outcome::Done => Ok(()),
                stop @ (Outcome::Retry(_) | Outcome::Fatal(_)) => Err(stop),
            },
            Err(e) => Err(errno::retry(op, &e.to_string())),
        }
    }

    fn present(&mut self, op: &Op, name: Name) -> Result<Option<LinkFacts>, Stop> {
        self.find_link(name).map_err(|e| errno::retry(op, &e.to_string()))
    }

    fn address(&mut self, op: &Op, name: Name, build: impl FnOnce(&mut Writer, u32)) -> Result<(), Stop> {
        match (self.device(name), op) {
            (Ok(Some(index)), _) => self.send(op, |w| build(w, index)),
            (Ok(None), Op::Remove(..)) => Ok(()),
            (Ok(None), _) => Err(errno::retry(op, &format!("no link {name}"))),
            (Err(e), _) => Err(errno::retry(op, &e.to_string())),
        }
    }

    fn remove_link(&mut self, op: &Op, name: Name) -> Result<(), Stop> {
        let Some(present) = self.present(op, name)? else { return Ok(()) };
        let index = present.info.index;
        self.send(op, |w| w.begin(libc::RTM_DELLINK, PLAIN, &ifinfomsg(index, 0, 0)))
    }

    fn ensure_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        let Some(present) = self.present(op, name)? else { return self.create_link(op, name, want) };
        let index = present.info.index;
        if !self.same_kind(&present, want) {
            return Err(errno::retry(op, "a link of this name exists with other fixed attributes"));
        }
        if let (LinkKind::Vxlan { vni, .. }, true) = (want.kind, present.learning != want.learning) {
            self.send(op, |w| encode::vxlan_learning(w, index, vni, want.learning))?;
        }
        let mtu = Some(want.mtu).filter(|m| *m != present.info.mtu);
        let mac = want.mac.filter(|m| Some(*m) != present.info.mac);
        let up = Some(want.up).filter(|u| *u != present.info.up);
        if mtu.is_some() || mac.is_some() || up.is_some() {
            self.send(op, |w| encode::alter_link(w, index, mtu, mac, up))?;
        }
        // What flannel made is ours from now on: else neither cleanup nor a change of the VNI would know it.
        if present.alias != self.options.alias {
            let alias = self.options.alias.clone();
            self.send(op, |w| encode::link_alias(w, index, &alias))?;
        }
        Ok(())
    }

    fn same_kind(&mut self, present: &LinkFacts, want: &Link) -> bool {
        let mut is = |index: u32, name: Name| matches!(self.device(name), Ok(Some(i)) if i == index);
        match (present.tunnel, want.kind) {
            (Tunnel::Vxlan { vni, port, parent, local, gbp }, LinkKind::Vxlan { .. }) => {
                let LinkKind::Vxlan { parent: name, .. } = want.kind else { return false };
                want.kind == LinkKind::Vxlan { vni, port, parent: name, local, gbp } && is(parent, name)
            }
            (Tunnel::Ipip { parent, local }, LinkKind::Ipip { parent: name, local: wanted }) => {
                local == wanted && (parent == 0 || is(parent, name))
            }
            _ => false,
        }
    }

    fn create_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        let (LinkKind::Vxlan { parent, .. } | LinkKind::Ipip { parent, .. }) = want.kind else {
            return Err(errno::fatal(op, "not a kind of link that weft creates"));
        };
        let parent = match self.device(parent) {
            Ok(Some(index)) => index,
            Ok(None) => return Err(errno::retry(op, &format!("no link {parent}"))),
            Err(e) => return Err(errno::retry(op, &e.to_string())),
        };
        self.send(op, |w| encode::create_link(w, name.as_str(), want, parent))?;
        let Some(made) = self.present(op, name)? else {
            return Err(errno::retry(op, "deleted by someone while it was set up"));
        };
        let index = made.info.index;
        // The kernel takes an alias, and the mode of link-local addresses, only for a link that exists.
        let alias = self.options.alias.clone();
        self.send(op, |w| encode::link_alias(w, index, &alias))?;
        // Best effort, both: a host without IPv6 refuses them, and needs neither.
        let _ = self.netlink.request(|w| encode::link_no_link_local(w, index));
        let _ = sysctl::ensure(&format!("net/ipv6/conf/{name}/accept_ra"), "0", true);
        if want.up {
            self.send(op, |w| encode::alter_link(w, index, None, None, Some(true)))?;
        }
        Ok(())
    }
}
