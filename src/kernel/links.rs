// SPDX-License-Identifier: Apache-2.0
//! Links and addresses, one by one: rare work, each step depends on the answer to the one before.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use nix::libc;
use weft_backends::diff::Op;
use weft_backends::link::{Difference, Link, LinkKind};
use weft_backends::state::{Key, Name, Value};

use super::decode::{self, LinkFacts};
use super::dump::is_wefts;
use super::encode;
use super::kinds::{self, Parents};
use super::linux::LinuxKernel;
use super::rt::{PLAIN, ifinfomsg};
use super::wire::{Writer, messages};
use super::{Outcome, errno, sysctl};

/// A device was deleted and made again between the last look and an operation on it.
pub(super) const MADE_ANEW: &str = "another program has just created a device with this name";

/// A step that ended the work: with its outcome.
type Stop = Outcome;

impl LinuxKernel {
    /// The link of this name, if there is one.
    pub(super) fn find_link(&mut self, name: Name) -> io::Result<Option<LinkFacts>> {
        let answer = self.netlink.request(|w| {
            w.begin(libc::RTM_GETLINK, PLAIN, &ifinfomsg(0, 0, 0));
            w.attr(libc::IFLA_IFNAME, name.as_bytes());
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
        let done = match op {
            Op::Ensure(Key::Link(name), Value::Link(link)) => self.ensure_link(op, *name, link),
            Op::Recreate(Key::Link(name), Value::Link(link)) => {
                self.remove_link(op, *name).and_then(|()| self.create_link(op, *name, link))
            }
            Op::Remove(Key::Link(name), _) => self.remove_link(op, *name),
            Op::Ensure(Key::Addr(name, net), _) | Op::Recreate(Key::Addr(name, net), _) => {
                self.address(op, *name, |w, index| encode::address(w, true, index, *net))
            }
            Op::Remove(Key::Addr(name, net), _) => {
                self.address(op, *name, |w, index| encode::address(w, false, index, *net))
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

    /// May this device be altered or re-created? Ours may. Another agent's may not, and neither may one that somebody made after the
    /// last look. One without any mark was seen by the caller, who decided that it is to become ours.
    fn check(&self, op: &Op, name: Name, present: &LinkFacts) -> Result<(), Stop> {
        if present.alias == self.options.alias {
            return Ok(());
        }
        if is_wefts(&present.alias) {
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
            false => Err(errno::retry(op, MADE_ANEW)),
        }
    }

    fn remove_link(&mut self, op: &Op, name: Name) -> Result<(), Stop> {
        let Some(present) = self.present(op, name)? else { return Ok(()) };
        let index = present.info.index;
        if matches!(op, Op::Remove(..)) && self.known.get(&name).is_some_and(|known| *known != index) {
            // What was to go has gone, and somebody else's is there now.
            return Ok(());
        }
        self.check(op, name, &present)?;
        self.known.remove(&name);
        self.send(op, |w| w.begin(libc::RTM_DELLINK, PLAIN, &ifinfomsg(index, 0, 0)))
    }

    fn ensure_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        let Some(present) = self.present(op, name)? else { return self.create_link(op, name, want) };
        self.check(op, name, &present)?;
        if want.kind.compare(&*self.kind(&present, want)) == Difference::Recreate {
            return Err(errno::retry(op, "a link of this name exists with other fixed attributes"));
        }
        self.alter(op, want, &present)
    }

    /// Gives a device that is there what it lacks, attribute by attribute: a refused one keeps no other from being set.
    fn alter(&mut self, op: &Op, want: &Link, present: &LinkFacts) -> Result<(), Stop> {
        let index = present.info.index;
        let (mut refused, mut works) = (Vec::new(), true);
        // What flannel made is ours from now on: else neither cleanup nor a change of the VNI would know it.
        if present.alias != self.options.alias {
            let alias = self.options.alias.clone();
            refused.extend(self.attribute(op, "alias", |w| encode::link_alias(w, index, &alias)));
        }
        let have = self.kind(present, want);
        if let Some(what) = kinds::codec(want.kind.name()).and_then(|codec| codec.difference(&*want.kind, &*have)) {
            refused.extend(self.attribute(op, what, |w| encode::alter_kind(w, index, &*want.kind)));
        }
        // Unlike the two above, packets are lost without these: pods are told the MTU, and peers write to the MAC.
        if want.mtu != present.info.mtu {
            let what = format!("mtu {}", want.mtu);
            let mtu = self.attribute(op, &what, |w| encode::alter_link(w, index, Some(want.mtu), None, None));
            works &= mtu.is_none();
            refused.extend(mtu);
        }
        if let Some(mac) = want.mac.filter(|mac| Some(*mac) != present.info.mac) {
            let what = format!("address {mac}");
            let mac = self.attribute(op, &what, |w| encode::alter_link(w, index, None, Some(mac), None));
            works &= mac.is_none();
            refused.extend(mac);
        }
        if want.up != present.info.up {
            let what = if want.up { "up" } else { "down" };
            let state = self.attribute(op, what, |w| encode::alter_link(w, index, None, None, Some(want.up)));
            // A device that is down carries no entries, so this is no mere attribute. Its cause may pass, as when another program
            // has the UDP port.
            if let Some((text, _)) = state {
                return Err(Outcome::Retry(text));
            }
        }
        if refused.is_empty() {
            return Ok(());
        }
        let retry = refused.iter().any(|(_, retry)| *retry);
        let missing: Vec<String> = refused.into_iter().map(|(text, _)| text).collect();
        Err(Outcome::Partly { missing: missing.join("; "), retry, works })
    }

    /// One attribute; when it is refused, why, and whether trying again may help.
    fn attribute(&mut self, op: &Op, what: &str, build: impl FnOnce(&mut Writer)) -> Option<(String, bool)> {
        match self.send(op, build) {
            Ok(()) | Err(Outcome::Done) => None,
            Err(Outcome::Retry(text)) => Some((format!("{what}: {text}"), true)),
            Err(Outcome::Fatal(text) | Outcome::Partly { missing: text, .. }) => {
                Some((format!("{what}: {text}"), false))
            }
        }
    }

    /// The kind of a device that exists, as far as it can be the wanted one: of all outer devices the wanted one's is known.
    fn kind(&mut self, present: &LinkFacts, want: &Link) -> Arc<dyn LinkKind> {
        let wanted = want.kind.parent();
        let index = wanted.and_then(|parent| self.device(parent).ok().flatten());
        present.kind(&Wanted(wanted.zip(index)))
    }

    fn create_link(&mut self, op: &Op, name: Name, want: &Link) -> Result<(), Stop> {
        if kinds::codec(want.kind.name()).is_none() {
            return Err(errno::fatal(op, "not a kind of link that weft creates"));
        }
        let parent = match want.kind.parent() {
            Some(parent) => self.parent(op, parent)?,
            None => 0,
        };
        let whole = self.send(op, |w| encode::create_link(w, &name.text(), want, parent));
        if let Err(stop @ Outcome::Fatal(_)) = whole {
            // Perhaps for an attribute that can be set later, too: a device without it is better than none.
            let plain = Link { mtu: 0, mac: None, ..want.clone() };
            self.send(op, |w| encode::create_link(w, &name.text(), &plain, parent)).map_err(|_| stop)?;
        } else {
            whole?;
        }
        let made = self.present(op, name)?;
        let made = made.filter(|made| want.kind.compare(&*self.kind(made, want)) != Difference::Recreate);
        let Some(made) = made else {
            return Err(errno::retry(op, "deleted by someone while it was set up"));
        };
        let index = made.info.index;
        self.known.insert(name, index);
        self.made.insert(index);
        // Best effort, both: a host without IPv6 refuses them, and needs neither.
        let _ = self.netlink.request(|w| encode::link_no_link_local(w, index));
        let _ = sysctl::ensure(sysctl::of_interface("ipv6", name, "accept_ra"), "0", true);
        // The kernel takes an alias only for a link that exists.
        self.alter(op, want, &made)
    }

    fn parent(&mut self, op: &Op, name: Name) -> Result<u32, Stop> {
        match self.device(name) {
            Ok(Some(index)) => Ok(index),
            Ok(None) => Err(errno::retry(op, &format!("no link {name}"))),
            Err(e) => Err(errno::retry(op, &e.to_string())),
        }
    }
}

/// The outer device that is wanted, with its index, if it exists.
struct Wanted(Option<(Name, u32)>);

impl Parents for Wanted {
    fn of_index(&self, index: u32) -> Option<Name> {
        self.0.filter(|(_, wanted)| *wanted == index).map(|(name, _)| name)
    }

    fn of_address(&self, _address: IpAddr) -> Option<Name> {
        self.0.map(|(name, _)| name)
    }
}
