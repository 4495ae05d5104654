// SPDX-License-Identifier: Apache-2.0
//! GC: pairs and addresses of attachments that the runtime does not know any more.

use std::collections::BTreeSet;

use super::plan::{ALIAS, Plan, host_name};
use crate::attachments::Known;
use crate::env::Verb;
use crate::hostlocal::{self, Reservation};
use crate::rtnl::Rtnl;
use crate::spec::{Error, code};

/// Removes what is left of this network. Carries on after a failure, and says all of them.
///
/// # Errors
/// Everything that failed, as one.
pub fn gc(plan: &Plan<'_>, known: &Known) -> Result<Vec<u8>, Error> {
    // By name: the words of a long alias are cut off.
    let valid: BTreeSet<String> = known.iter().map(|one| host_name(&one.container, &one.ifname)).collect();
    let mut host = Rtnl::open()?;
    let mut failed = Vec::new();
    for link in host.links()? {
        let mut words = link.alias.split(' ');
        let ours = words.next() == Some(ALIAS) && words.next() == Some(plan.network);
        if !ours || valid.contains(&link.name) {
            continue;
        }
        if let Err(error) = host.remove_link(link.index) {
            failed.push(format!("{}: {error}", link.name));
        }
        if let (Some(container), Some(ifname)) = (words.next(), words.next())
            && let Err(error) = plan.ipam_release(container, ifname)
        {
            failed.push(format!("the address of {container} {ifname}: {error}"));
        }
    }
    // An ADD that was killed early has an address and no pair.
    if let Some(dir) = plan.reservations() {
        let stale = |r: &Reservation| match &r.ifname {
            Some(ifname) => !valid.contains(&host_name(&r.container, ifname)),
            None => false,
        };
        failed.extend(hostlocal::release(&dir, stale).err().map(|error| error.to_string()));
    }
    if let Err(error) = plan.ipam(Verb::Gc) {
        failed.push(format!("GC of the IPAM plugin: {error}"));
    }
    if failed.is_empty() {
        Ok(Vec::new())
    } else {
        Err(Error::new(code::OTHER, "GC is incomplete").details(failed.join("; ")))
    }
}
