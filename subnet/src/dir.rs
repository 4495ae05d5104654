// SPDX-License-Identifier: Apache-2.0
//! The directory store: `config.json`, and a file `subnets/<key>.json` for each lease. The file contains the value that etcd would
//! contain, with one more member, `Created`, in nanoseconds since 1970. flannel ignores this member.
//!
//! Every write happens under a lock on the file `.lock`, to a temporary file that is then renamed. So compare-and-swap works between all
//! processes that share one file system with working locks. Leases do not expire.

mod files;
mod watch;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use nix::errno::Errno;
use tokio::sync::mpsc;

use crate::allocate;
use crate::attrs::Attrs;
use crate::backend_types::BackendTypes;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{Id, Lease, Record};
use crate::outside::wall_clock;
use crate::source::{Capabilities, Error, Event, LastNetConf, LeaseRequest, Local, Source, UNREADABLE};

use files::{Files, Look};

/// Leases in a directory.
#[derive(Debug)]
pub struct DirStore {
    files: Arc<Files>,
    types: BackendTypes,
    last_net_conf: LastNetConf,
    /// Records that this store wrote since the watch last reported them.
    wrote: RefCell<BTreeSet<Id>>,
    /// Why the directory is polled instead of watched. `None` if it is watched.
    polled: Cell<Option<Errno>>,
}

/// Returns nanoseconds since 1970.
fn now() -> u64 {
    u64::try_from(wall_clock().as_nanos()).unwrap_or(u64::MAX)
}

impl DirStore {
    /// Creates the store in this directory. If the directory is missing, it is created (0755) at the first use.
    pub fn new(path: PathBuf, types: BackendTypes) -> DirStore {
        let files = Arc::new(Files::new(path));
        let (last_net_conf, wrote, polled) = (LastNetConf::default(), RefCell::default(), Cell::default());
        DirStore { files, types, last_net_conf, wrote, polled }
    }

    /// Records that the directory is watched with inotify (`None`), or why it is polled. A change is logged.
    fn set_polled(&self, lacks: Option<Errno>) {
        match (self.polled.replace(lacks), lacks) {
            (None, Some(_)) => tracing::warn!("{}", self.remark().unwrap_or_default()),
            (Some(_), None) => tracing::info!("{} is watched by inotify again", self.files.path().display()),
            _ => {}
        }
    }

    /// Runs `work` while no other process writes.
    async fn locked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Files) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let lock = self.files.lock().await?;
        self.files
            .work(move |files| {
                let done = work(files);
                drop(lock);
                done
            })
            .await
    }

    /// Writes a lease while no other process writes.
    async fn write(&self, work: impl FnOnce(&Files) -> Result<Lease, Error> + Send + 'static) -> Result<Lease, Error> {
        let lease = self.locked(work).await?;
        self.wrote.borrow_mut().insert(lease.id.clone());
        Ok(lease)
    }

    async fn read_config(&self) -> Result<String, Error> {
        let text = self.files.work(|files| files.config()?.ok_or_else(|| files.missing_config())).await?;
        self.last_net_conf.set(&text);
        Ok(text)
    }
}

/// Reads all records.
///
/// # Errors
/// The directory cannot be listed, or the disk fails for the file of our previous subnet. That may be our lease, so the node does not take
/// another one before it can be read.
fn read_all(files: &Files, evidence: &Evidence) -> Result<Vec<Record>, Error> {
    let previous = evidence.previous.map(|subnets| subnets.to_key());
    let is_previous = |look: &Look| previous.as_deref() == Some(&*look.record.id);
    let looks = files.look_at_all()?.into_iter();
    looks.map(|look| if is_previous(&look) { look.known() } else { Ok(look.record) }).collect()
}

fn find_own(files: &Files, evidence: &Evidence) -> Result<Option<Lease>, Error> {
    let records = read_all(files, evidence)?;
    let leases = records.iter().filter_map(|record| record.lease.as_ref().ok());
    Ok(evidence.ours(leases).first().copied().cloned())
}

fn acquire(files: &Files, request: &LeaseRequest, evidence: &Evidence) -> Result<Lease, Error> {
    let records = read_all(files, evidence)?;
    let ours = evidence.ours(records.iter().filter_map(|record| record.lease.as_ref().ok()));
    if let Some(own) = ours.iter().find(|own| allocate::is_compatible(&request.net_conf, &own.subnets)) {
        return rewrite(files, own, &request.attrs);
    }
    let our_ids: HashSet<&Id> = ours.iter().map(|own| &own.id).collect();
    let others = || records.iter().filter(|record| !our_ids.contains(&record.id));
    let taken = others().filter_map(|record| Subnets::from_key(&record.id)).collect();
    let nodes = others().filter_map(|record| record.lease.as_ref().ok()).map(|lease| &lease.attrs);
    let chosen = request.choose(taken, nodes, ours.iter().map(|own| own.subnets))?;
    let created = files.create(&chosen.to_key(), &request.attrs, now())?;
    // Only now, because the pods of this node may still use one of them.
    for own in &ours {
        if let Err(error) = files.delete(&own.id) {
            // Leases of a directory do not end. With the new file, each further attempt would leave one more lease.
            files.delete(&created.id)?;
            return Err(error);
        }
    }
    Ok(created)
}

fn rewrite(files: &Files, own: &Lease, attrs: &Attrs) -> Result<Lease, Error> {
    // A file without `Created` counts as the youngest until it is written again, which happens now.
    let has_age = own.age.stamp != u64::MAX;
    if has_age && own.attrs == *attrs {
        return Ok(own.clone());
    }
    files.replace(&own.id, attrs, if has_age { own.age.stamp } else { now() })
}

fn retake(files: &Files, subnets: &Subnets, evidence: &Evidence, attrs: &Attrs) -> Result<Lease, Error> {
    let id = subnets.to_key();
    match files.read(&id)?.map(|record| record.lease) {
        Some(Ok(own)) if evidence.proves(&own) => rewrite(files, &own, attrs),
        Some(Ok(other)) => Err(Error::Taken { subnet: *subnets, owner: evidence.owner(&other) }),
        // The file was ours, and an unreadable value does not say that it belongs to another node.
        Some(Err(_)) => files.replace(&id, attrs, now()),
        None => {
            let mut leases = files.scan()?.into_iter().filter_map(|record| record.lease.ok());
            match leases.find(|lease| evidence.keeps_us_from(subnets, lease)) {
                Some(other) => Err(Error::Taken { subnet: *subnets, owner: evidence.owner(&other) }),
                None => files.create(&id, attrs, now()),
            }
        }
    }
}

fn release(files: &Files, lease: &Lease, evidence: &Evidence) -> Result<(), Error> {
    match files.read(&lease.id)?.map(|record| record.lease) {
        None => Err(files.missing(&lease.id)),
        Some(Ok(own)) if evidence.proves(&own) => files.delete(&lease.id),
        Some(Ok(other)) => Err(Error::Taken { subnet: lease.subnets, owner: evidence.owner(&other) }),
        Some(Err(_)) => Err(Error::Taken { subnet: lease.subnets, owner: UNREADABLE.to_owned() }),
    }
}

impl Source for DirStore {
    fn describe(&self) -> String {
        format!("dir {}", self.files.path().display())
    }

    fn remark(&self) -> Option<String> {
        let errno = self.polled.get()?;
        let path = self.files.path().display();
        Some(format!(
            "{path} cannot be watched ({}) and is checked every second instead: raise fs.inotify.max_user_instances",
            errno.desc()
        ))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: false, assigned: false }
    }

    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(self.read_config())
    }

    fn own<'a>(&'a self, evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        let evidence = evidence.clone();
        Box::pin(self.files.work(move |files| find_own(files, &evidence)))
    }

    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        let (request, evidence) = (request.clone(), request.evidence(self.types));
        Box::pin(self.write(move |files| acquire(files, &request, &evidence)))
    }

    fn retake<'a>(&'a self, subnets: &'a Subnets, was: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        let evidence = Evidence::of(self.types, *subnets, was).with_next(attrs);
        let (subnets, attrs) = (*subnets, attrs.clone());
        Box::pin(self.write(move |files| retake(files, &subnets, &evidence, &attrs)))
    }

    fn release<'a>(&'a self, lease: &'a Lease) -> Local<'a, Result<(), Error>> {
        let (lease, evidence) = (lease.clone(), Evidence::of(self.types, lease.subnets, &lease.attrs));
        Box::pin(self.locked(move |files| release(files, &lease, &evidence)))
    }

    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        Box::pin(self.files.work(Files::scan))
    }

    fn remove<'a>(&'a self, id: &'a str) -> Local<'a, Result<(), Error>> {
        let id = id.to_owned();
        Box::pin(self.locked(move |files| files.delete(&id)))
    }

    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()> {
        Box::pin(watch::run(self, out))
    }
}
