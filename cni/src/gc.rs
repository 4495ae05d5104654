// SPDX-License-Identifier: Apache-2.0
//! GC: everything of pods that the runtime no longer knows is taken back. One that fails does not stop the rest.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::attachments::{KEYS, Known};
use crate::conf::Conf;
use crate::delegate;
use crate::env::{Request, Verb};
use crate::flannel::take_back;
use crate::hostlocal::{self, Reservation};
use crate::masquerade;
use crate::plugin::Call;
use crate::record::{self, Caller, Record};
use crate::render::{self, kind};
use crate::spec::{Error, Version, code};
use crate::subnet_env::SubnetEnv;

/// A call that works on a pod which the runtime does not know is an orphan: it gets so long to end.
const ORPHAN: Duration = Duration::from_secs(3);
/// Takes back what belongs to nobody.
///
/// # Errors
/// Everything that failed, as one.
pub fn run(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let known = Known::read(&call.conf)?;
    let mut failed = Vec::new();
    record::sweep(&conf.data_dir, ".");
    let reservations = hostlocal::dir(&conf.ipam, &call.name);
    for record in record::list(&conf.data_dir)?.iter().filter(|record| record.network() == call.name) {
        let ifname = record.caller.as_ref().map(|caller| caller.ifname.as_str());
        if !known.has(&record.container, ifname) {
            let took = forget(call, record, reservations.as_deref());
            failed.extend(took.err().map(|error| format!("{}: {error}", record.path.display())));
        }
    }
    // What a record still speaks of is the delegate's to take back.
    let kept = record::list(&conf.data_dir)?;
    let recorded = |id: &str| kept.iter().any(|record| record.container == id);
    let lives = |id: &str| known.has(id, None) || recorded(id);
    if let Some(dir) = reservations {
        let stale = |r: &Reservation| !known.has(&r.container, r.ifname.as_deref()) && !recorded(&r.container);
        match hostlocal::release(&dir, stale) {
            Ok(gone) => gone.iter().for_each(|r| note!("address {} of {:?} is free again", r.addr, r.container)),
            Err(error) => failed.push(error.to_string()),
        }
    }
    failed.extend(masquerade::sweep(&call.name, &lives).err());
    failed.extend(forward(call, conf).err().map(|error| error.to_string()));
    if failed.is_empty() { Ok(Vec::new()) } else { Err(Error::new(code::OTHER, failed.join("; "))) }
}

/// The delegate's DEL for a record that nobody will call DEL for.
fn forget(call: &Call, record: &Record, reservations: Option<&Path>) -> Result<(), Error> {
    let Some(locked) = record::take(&record.path, ORPHAN)? else { return Ok(()) };
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
    take_back(locked, &request)
}

/// flannel's records do not say which interface they are of: host-local may.
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
    // A path with a process id in it may be another pod's by now; a name is given once.
    let named = ["/run/netns/", "/var/run/netns/"].iter().any(|dir| caller.netns.starts_with(dir));
    let netns = if named && Path::new(&caller.netns).exists() { caller.netns.clone() } else { String::new() };
    Request {
        verb: Verb::Del,
        container: record.container.clone(),
        ifname: caller.ifname.clone(),
        netns,
        args: caller.args.clone(),
        ..call.request.clone()
    }
}

/// GC is the delegate's business too, where it knows the verb.
fn forward(call: &Call, conf: &Conf) -> Result<(), Error> {
    let env = SubnetEnv::load(&conf.subnet_file).unwrap_or_default();
    let mut rendered = render::delegate(call, conf, &env)?;
    for key in KEYS {
        if let Some(list) = call.conf.get(key) {
            rendered.insert(key.to_owned(), list.clone());
        }
    }
    let name = kind(&rendered).to_owned();
    if !delegate::speaks(&name, Version(1, 1, 0), &call.request)? {
        return Ok(());
    }
    delegate::call(&name, &Value::Object(rendered), Verb::Gc, &call.request).map(drop)
}
