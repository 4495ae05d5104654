// SPDX-License-Identifier: Apache-2.0
//! GC: removes everything that belongs to attachments which are not in the runtime's list. A failure does not stop the
//! rest.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::attachments::{KEYS, ValidAttachments};
use crate::conf::Conf;
use crate::delegate;
use crate::env::{Request, Verb, is_namespace};
use crate::hostlocal::{self, Reservation};
use crate::masquerade;
use crate::plugin::Call;
use crate::record::{self, Caller, Record};
use crate::render::{self, kind};
use crate::spec::{Error, Version, code};
use crate::subnet_env::CheckedSubnetEnv;

/// How long GC waits for a running call for an attachment that is not valid any more.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Removes the records, addresses and masquerade rules of attachments that are not valid, then calls the delegate's GC.
///
/// # Errors
/// [`code::OTHER`] with everything that failed.
pub fn run(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let valid = ValidAttachments::read(&call.conf)?;
    let mut failed = Vec::new();
    record::sweep(&conf.data_dir, ".");
    let reservations = hostlocal::dir(&conf.ipam, &call.name);
    for record in record::list(&conf.data_dir)?.iter().filter(|record| record.network() == call.name) {
        let ifname = record.caller.as_ref().map(|caller| caller.ifname.as_str());
        if !valid.contains(&record.container, ifname) {
            let collected = collect(call, record, reservations.as_deref());
            failed.extend(collected.err().map(|error| format!("{}: {error}", record.path.display())));
        }
    }
    // The delegate removes what belongs to an attachment with a record.
    let kept: BTreeSet<String> = record::list(&conf.data_dir)?.into_iter().map(|record| record.container).collect();
    let recorded = |id: &str| kept.contains(id);
    let is_alive = |id: &str| valid.contains(id, None) || recorded(id);
    if let Some(dir) = reservations {
        let stale = |r: &Reservation| !valid.contains(&r.container, r.ifname.as_deref()) && !recorded(&r.container);
        match hostlocal::release(&dir, stale) {
            Ok(gone) => gone.iter().for_each(|r| note!("released address {} of container {:?}", r.addr, r.container)),
            Err(error) => failed.push(error.to_string()),
        }
    }
    failed.extend(masquerade::remove_stale(&call.name, &is_alive).iter().map(ToString::to_string));
    failed.extend(delegate_gc(call, conf).err().map(|error| error.to_string()));
    if failed.is_empty() { Ok(Vec::new()) } else { Err(Error::new(code::OTHER, failed.join("; "))) }
}

/// Calls the delegate's DEL for a record. The runtime will not call DEL for it.
fn collect(call: &Call, record: &Record, reservations: Option<&Path>) -> Result<(), Error> {
    let Some(locked) = record::take(&record.path, CALL_TIMEOUT)? else { return Ok(()) };
    let callers = match &locked.record.caller {
        Some(caller) => vec![caller.clone()],
        None => callers(&locked.record, reservations)?,
    };
    let (last, others) = callers.split_last().ok_or_else(|| Error::new(code::OTHER, "no interface"))?;
    if let Some(conf) = &locked.record.conf {
        for caller in others {
            let request = request(call, &locked.record, caller);
            delegate::call(kind(conf), &Value::Object(conf.clone()), Verb::Del, &request)?;
        }
    }
    let request = request(call, &locked.record, last);
    delegate::del_recorded(locked, &request)
}

/// Finds the interfaces of a record that flannel's plugin wrote. The record does not name its interface, but
/// host-local's reservations may.
fn callers(record: &Record, reservations: Option<&Path>) -> Result<Vec<Caller>, Error> {
    let all = reservations.map_or(Ok(Vec::new()), hostlocal::list)?;
    let ours = all.into_iter().filter(|reservation| reservation.container == record.container);
    let mut names: BTreeSet<String> = ours.filter_map(|reservation| reservation.ifname).collect();
    if names.is_empty() {
        names.insert("eth0".to_owned());
    }
    Ok(names.into_iter().map(|ifname| Caller { ifname, ..Caller::default() }).collect())
}

fn request(call: &Call, record: &Record, caller: &Caller) -> Request {
    // The kernel may have reused the process id in a path below /proc. A name below /run/netns is used only once.
    let named = ["/run/netns/", "/var/run/netns/"].iter().any(|dir| caller.netns.starts_with(dir));
    let netns = if named && is_namespace(&caller.netns) { caller.netns.clone() } else { String::new() };
    Request {
        verb: Verb::Del,
        container: record.container.clone(),
        ifname: caller.ifname.clone(),
        netns,
        args: caller.args.clone(),
        ..call.request.clone()
    }
}

/// Calls the delegate's GC if the delegate supports it.
fn delegate_gc(call: &Call, conf: &Conf) -> Result<(), Error> {
    let env = CheckedSubnetEnv::load(&conf.subnet_file).unwrap_or_default();
    let mut rendered = render::delegate(call, conf, &env)?;
    for key in KEYS {
        if let Some(list) = call.conf.get(key) {
            rendered.insert(key.to_owned(), list.clone());
        }
    }
    let name = kind(&rendered).to_owned();
    if !delegate::supports(&name, Version(1, 1, 0), &call.request)? {
        return Ok(());
    }
    delegate::call(&name, &Value::Object(rendered), Verb::Gc, &call.request).map(drop)
}
