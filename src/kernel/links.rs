// SPDX-License-Identifier: Apache-2.0
//! Writes links and addresses one by one. This is rare, and each step depends on the answer to the one before.

use std::io;
use std::sync::Arc;

use nix::libc;
use weft_backends::diff::Op;
use weft_backends::link::{Difference, Link, LinkKind};
use weft_backends::state::{Key, Name, Value};
use weft_backends::wireguard::WireGuardLink;

use super::kinds::{self, Parents};
use super::link_messages::{self, LinkFacts, is_alias_of_weft};
use super::linux::{CREATED_BY_ANOTHER, LinuxKernel};
use super::wire::{Writer, messages};
use super::wireguard_port::PortWrite;
use super::{Outcome, errno, sysctl};

/// The outcome of the step that ended an operation early.
type Stop = Outcome;

impl LinuxKernel {
    /// Returns the link with this name, if there is one.
    pub(super) fn find_link(&mut self, name: Name) -> io::Result<Option<LinkFacts>> {
        let answer = self.netlink.request(|w| link_messages::get_link(w, name))?;
        match answer {
            Ok(data) => Ok(messages(&data)
                .filter(|m| m.kind == libc::RTM_NEWLINK)
                .find_map(|m| link_messages::read_link(m.payload))),
            Err(refusal) if refusal.errno == nix::errno::Errno::ENODEV => Ok(None),
            Err(refusal) => Err(refusal.errno.into()),
        }
    }

    /// Returns the port on which a WireGuard device listens. `None` if it is down, or if there is no such device of this name.
    pub(super) fn observe_port(&mut self, name: Name) -> io::Result<Option<u16>> {
        let is_up = self.find_link(name)?.is_some_and(|link| link.info.up);
        Ok(if is_up { self.wireguard_device(name)?.map(|device| device.port) } else { None })
    }

    /// Carries out one operation on a link, an address or the fence.
    pub(super) fn apply_one(&mut self, op: &Op) -> Outcome {
        let done = match op {
            Op::Ensure(Key::Link(name), Value::Link(link)) => self.ensure_link(op, *name, link),
            Op::Recreate(Key::Link(name), Value::Link(link)) => self.recreate_link(op, *name, link),
            Op::Remove(Key::Link(name), _) => self.remove_link(op, *name),
            Op::Ensure(Key::Addr(name, net), _) | Op::Recreate(Key::Addr(name, net), _) => {
                self.address(op, *name, |w, index| link_messages::address(w, true, index, *net))
            }
            Op::Remove(Key::Addr(name, net), _) => {
                self.address(op, *name, |w, index| link_messages::address(w, false, index, *net))
            }
            Op::Ensure(Key::Fence(_), _) | Op::Recreate(Key::Fence(_), _) | Op::Remove(Key::Fence(_), _) => {
                return self.fence.apply(&mut self.netlink, op);
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
                stop => Err(stop),
            },
            Err(e) => Err(errno::retry(op, &e.to_string())),
        }
    }

    fn present(&mut self, op: &Op, name: Name) -> Result<Option<LinkFacts>, Stop> {
        self.find_link(name).map_err(|e| errno::retry(op, &e.to_string()))
    }

    fn address(&mut self, op: &Op, name: Name, build: impl FnOnce(&mut Writer, u32)) -> Result<(), Stop> {
        let index = self.resolve(op, name)?;
        self.send(op, |w| build(w, index))
    }

    /// Checks that this device may be altered or re-created. A device of this agent may be. A device of another agent may not, and
    /// neither may one that another program created after the last observation. A device without the alias of an agent was in that
    /// observation, and the caller decided to take it over.
    fn check(&self, op: &Op, name: Name, present: &LinkFacts) -> Result<(), Stop> {
        if present.alias == self.options.alias {
            return Ok(());
        }
        if is_alias_of_weft(&present.alias) {
            let alias: String = present.alias.escape_debug().take(100).collect();
            return Err(errno::fatal(
                op,
                &format!(
                    "another weft agent of this host made it (alias \"{alias}\"): give one of the two networks another VNI; \
                     if that agent runs no more, remove the device: ip link del {name}"
                ),
            ));
        }
        match self.known.get(&name) == Some(&present.info.index) {
            true => Ok(()),
            false => Err(errno::retry(op, CREATED_BY_ANOTHER)),
        }
    }

    fn remove_link(&mut self, op: &Op, name: Name) -> Result<(), Stop> {
        let Some(present) = self.present(op, name)? else { return Ok(()) };
        let index = present.info.index;
        if matches!(op, Op::Remove(..)) && self.known.get(&name).is_some_and(|known| *known != index) {
            // The device is gone, and another program has created one with its name.
            return Ok(());
        }
        self.check(op, name, &present)?;
        self.known.remove(&name);
        self.send(op, |w| link_messages::delete_link(w, index))
    }

    /// Deletes a device and creates it again. While its outer device is missing, it stays: it could not be created, and it carries packets as
    /// before if the outer device only has another name by now.
    fn recreate_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        if let Some(parent) = want.kind.parent() {
            self.parent(op, parent)?;
        }
        self.remove_link(op, name)?;
        self.create_link(op, name, want)
    }

    fn ensure_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        let Some(present) = self.present(op, name)? else { return self.create_link(op, name, want) };
        self.check(op, name, &present)?;
        if want.kind.compare(&*self.kind(&present, want)) == Difference::Recreate {
            return Err(errno::retry(op, "a link of this name exists with other fixed attributes"));
        }
        self.alter(op, want, &present)
    }

    /// Sets the attributes of an existing device that differ, one by one, so that the kernel sets the others even if it refuses one.
    fn alter(&mut self, op: &Op, want: &Link, present: &LinkFacts) -> Result<(), Stop> {
        let index = present.info.index;
        let (mut refused, mut works) = (Vec::new(), true);
        // A device that flannel made becomes ours. Without our alias, neither cleanup nor a change of the VNI would find it.
        if present.alias != self.options.alias {
            let alias = self.options.alias.clone();
            refused.extend(self.attribute(op, "alias", |w| link_messages::set_alias(w, index, &alias)));
        }
        let have = self.kind(present, want);
        if let Some(what) = kinds::codec(want.kind.name()).and_then(|codec| codec.difference(&*want.kind, &*have)) {
            refused.extend(self.attribute(op, what, |w| link_messages::alter_kind(w, index, &*want.kind)));
        }
        // Before the device comes up, so that it listens on its port from the beginning.
        let mut port = PortWrite::default();
        if let (Key::Link(name), Some(wireguard)) = (op.key(), want.kind.of::<WireGuardLink>()) {
            port = self.write_wireguard(op, name, wireguard)?;
            // No packet depends on it: our lease names the port that the device has.
            refused.extend(port.refused.take().map(|missing| (missing, true)));
        }
        // Unlike the attributes above, these affect packets: pods use the MTU, and peers send to the MAC.
        if want.mtu != present.info.mtu {
            let what = format!("mtu {}", want.mtu);
            let mtu = self.attribute(op, &what, |w| link_messages::set_mtu(w, index, want.mtu));
            works &= mtu.is_none();
            refused.extend(mtu);
        }
        if let Some(mac) = want.mac.filter(|mac| Some(*mac) != present.info.mac) {
            let what = format!("address {mac}");
            let mac = self.attribute(op, &what, |w| link_messages::set_mac(w, index, mac));
            works &= mac.is_none();
            refused.extend(mac);
        }
        if want.up != present.info.up {
            refused.extend(self.set_up(op, (index, want.up), port.before)?.map(|missing| (missing, true)));
        }
        if refused.is_empty() {
            return Ok(());
        }
        let retry = refused.iter().any(|(_, retry)| *retry);
        let missing: Vec<String> = refused.into_iter().map(|(text, _)| text).collect();
        Err(Outcome::Partly { missing: missing.join("; "), retry, works })
    }

    /// Brings the device with this index up, or takes it down. `port` is another one that a WireGuard device had before this operation.
    ///
    /// Returns what is missing if the device came up with that one only. While it is down, the kernel accepts also a port that another
    /// program has.
    fn set_up(&mut self, op: &Op, (index, up): (u32, bool), port: Option<u16>) -> Result<Option<String>, Stop> {
        let what = if up { "up" } else { "down" };
        let set = |kernel: &mut Self| kernel.attribute(op, what, |w| link_messages::set_up(w, index, up));
        let Some((refusal, _)) = set(self) else { return Ok(None) };
        if let (true, Key::Link(name), Some(port)) = (up, op.key(), port)
            && self.write_port(name, port).is_ok()
            && set(self).is_none()
        {
            return Ok(Some(format!("{refusal}; {name} goes on with port {port}")));
        }
        // Without this the whole device does not work, since it has no entries while it is down. The cause may pass, for example when
        // another program uses the UDP port.
        Err(Outcome::Retry(refusal))
    }

    /// Sets one attribute. If the kernel refuses it, returns the reason, and true if it may accept it later.
    fn attribute(&mut self, op: &Op, what: &str, build: impl FnOnce(&mut Writer)) -> Option<(String, bool)> {
        match self.send(op, build) {
            Ok(()) | Err(Outcome::Done) => None,
            Err(Outcome::Retry(text)) => Some((format!("{what}: {text}"), true)),
            Err(Outcome::Fatal(text) | Outcome::Partly { missing: text, .. }) => {
                Some((format!("{what}: {text}"), false))
            }
        }
    }

    /// Returns the type of an existing device. Only the wanted outer device is looked up; with another one the type differs anyway.
    fn kind(&mut self, present: &LinkFacts, want: &Link) -> Arc<dyn LinkKind> {
        let wanted = want.kind.parent();
        let index = wanted.and_then(|parent| self.device(parent).ok().flatten());
        present.kind(&Wanted(wanted.zip(index)))
    }

    fn create_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        let Some(codec) = kinds::codec(want.kind.name()) else {
            return Err(errno::fatal(op, "not a kind of link that weft creates"));
        };
        match codec.create_without_message(name) {
            Some(created) => created.map_err(|error| errno::retry(op, &error.to_string()))?,
            None => self.create_by_message(op, name, want)?,
        }
        let made = self.present(op, name)?;
        let made = made.filter(|made| want.kind.compare(&*self.kind(made, want)) != Difference::Recreate);
        let Some(made) = made else {
            return Err(errno::retry(op, "another program deleted it while it was being set up"));
        };
        let index = made.info.index;
        self.known.insert(name, index);
        self.made.insert(index);
        // A host without IPv6 refuses both of these, and needs neither, so their errors do not matter.
        let _ = self.netlink.request(|w| link_messages::set_no_link_local_address(w, index));
        let _ = sysctl::ensure(sysctl::of_interface("ipv6", name, "accept_ra"), "0", true);
        // The kernel accepts an alias only for an existing link.
        self.alter(op, want, &made)
    }

    fn create_by_message(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        let parent = match want.kind.parent() {
            Some(parent) => self.parent(op, parent)?,
            None => 0,
        };
        let created = self.send(op, |w| link_messages::create_link(w, name, want, parent));
        let Err(stop @ Outcome::Fatal(_)) = created else { return created };
        // The cause may be an attribute that can also be set later. A device without that attribute is better than none.
        let plain = Link { mtu: 0, mac: None, ..want.clone() };
        self.send(op, |w| link_messages::create_link(w, name, &plain, parent)).map_err(|_| stop)
    }

    fn parent(&mut self, op: &Op, name: Name) -> Result<u32, Stop> {
        match self.device(name) {
            Ok(Some(index)) => Ok(index),
            Ok(None) => Err(errno::retry(op, &format!("no link {name}"))),
            Err(e) => Err(errno::retry(op, &e.to_string())),
        }
    }
}

/// The wanted outer device with its index, if it exists.
struct Wanted(Option<(Name, u32)>);

impl Parents for Wanted {
    fn of_index(&self, index: u32) -> Option<Name> {
        self.0.filter(|(_, wanted)| *wanted == index).map(|(name, _)| name)
    }
}
