// SPDX-License-Identifier: Apache-2.0
//! GC: removes pairs and addresses of attachments that are not in the runtime's list.

use std::collections::BTreeSet;

use weft_netlink::rtnl::Rtnl;

use super::params::{ALIAS, Params, host_name};
use crate::attachments::ValidAttachments;
use crate::env::Verb;
use crate::hostlocal::{self, Reservation};
use crate::spec::{Error, code};

/// Removes what is left of this network. A failure does not stop the rest.
///
/// # Errors
/// [`code::OTHER`]; the details list everything that failed.
pub fn gc(params: &Params<'_>, attachments: &ValidAttachments) -> Result<Vec<u8>, Error> {
    // Links are compared by name, because a long alias is truncated.
    let valid: BTreeSet<String> = attachments.iter().map(|one| host_name(&one.container, &one.ifname)).collect();
    let mut host = Rtnl::open()?;
    let mut failed = Vec::new();
    for link in host.links()? {
        let mut words = link.alias.split(' ');
        let ours = words.next() == Some(ALIAS) && words.next() == Some(params.network);
        if !ours || valid.contains(&link.name) {
            continue;
        }
        if let Err(error) = host.remove_link(link.index) {
            failed.push(format!("{}: {error}", link.name));
        }
        if let (Some(container), Some(ifname)) = (words.next(), words.next())
            && let Err(error) = params.ipam_release(container, ifname)
        {
            failed.push(format!("the address of {container} {ifname}: {error}"));
        }
    }
    // An ADD that was killed early has reserved an address, but has not created a pair.
    if let Some(dir) = params.reservations() {
        let stale = |r: &Reservation| match &r.ifname {
            Some(ifname) => !valid.contains(&host_name(&r.container, ifname)),
            None => false,
        };
        failed.extend(hostlocal::release(&dir, stale).err().map(|error| error.to_string()));
    }
    if let Err(error) = params.ipam(Verb::Gc) {
        failed.push(format!("GC of the IPAM plugin: {error}"));
    }
    if failed.is_empty() {
        Ok(Vec::new())
    } else {
        Err(Error::new(code::OTHER, "GC is incomplete").details(failed.join("; ")))
    }
}
