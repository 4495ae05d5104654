// SPDX-License-Identifier: Apache-2.0
//! What becomes of the answers of the kernel. The requests of these tests only read, so they need no root.

use super::*;
use crate::socket::tests::{faked, with_unread_dump};

/// A name that no link has.
const NOBODY: &str = "no-such-link";

/// Begins the question for the link with this name.
fn ask(w: &mut Writer, name: &str) {
    link_by_name(w, libc::RTM_GETLINK, PLAIN, name, LinkFlags::default());
}

#[test]
fn a_link_that_does_not_exist_is_none_and_another_refusal_is_an_error() {
    let mut rtnl = Rtnl::open().unwrap();
    let lo = rtnl.link("lo").unwrap().expect("every namespace has lo");
    assert!(lo.is_loopback() && lo.name == "lo", "{lo:?}");
    assert_eq!(rtnl.link(NOBODY).unwrap(), None);
    // No name is as long as this.
    assert!(rtnl.link(&"x".repeat(300)).is_err());
}

/// A message after the refused one may have been carried out, and must not hide the refusal.
#[test]
fn the_refused_message_of_a_batch_is_named_wherever_it_stands() {
    let mut rtnl = Rtnl::open().unwrap();
    for names in [["lo", NOBODY], [NOBODY, "lo"]] {
        let mut batch = rtnl.batch();
        for name in names {
            let what = if name == NOBODY { "read what is missing" } else { "read what is there" };
            batch.push(what, |w| ask(w, name));
        }
        let refused = batch.send().unwrap().unwrap_err();
        assert_eq!((refused.what, refused.errno), ("read what is missing", Errno::ENODEV), "{names:?}");
    }
    let mut batch = rtnl.batch();
    batch.push("read what is there", |w| ask(w, "lo"));
    assert_eq!(links(&batch.send().unwrap().unwrap()).count(), 1);
}

/// [`Rtnl::link`] would return a link of the dump.
#[test]
fn replies_that_nobody_has_read_are_not_those_of_the_next_batch() {
    let mut rtnl = Rtnl { socket: with_unread_dump() };
    let mut batch = rtnl.batch();
    batch.push("read what is there", |w| ask(w, "lo"));
    assert_eq!(links(&batch.send().unwrap().unwrap()).count(), 1, "the dump has lo, too");
}

#[test]
fn a_batch_whose_answer_is_lost_is_an_error() {
    let (socket, _kernel, _) = faked();
    let mut rtnl = Rtnl { socket };
    let error = rtnl.request("set the MTU", |w| ask(w, "lo")).unwrap_err();
    assert!(matches!(&error, Error::Io { error, .. } if error.kind() == io::ErrorKind::WouldBlock), "{error}");
}

#[test]
fn what_is_gone_is_removed_and_another_refusal_is_an_error() {
    let mut rtnl = Rtnl::open().unwrap();
    rtnl.remove("remove the link", |w| ask(w, NOBODY)).unwrap();
    // The kernel has no routes of such a family.
    let refused = rtnl.remove("remove the route", |w| w.begin(libc::RTM_GETROUTE, PLAIN, &[99; 12])).unwrap_err();
    assert!(matches!(&refused, Error::Refused(refused) if refused.what == "remove the route"), "{refused}");
}
