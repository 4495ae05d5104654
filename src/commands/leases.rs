// SPDX-License-Identifier: Apache-2.0
//! `weft release` and `weft lease`, which handle leases without an agent.

use std::fmt::Write;
use std::net::IpAddr;

use anyhow::Context;
use weft_subnet::cidr::{Subnets, family};
use weft_subnet::env::SubnetEnv;
use weft_subnet::lease::{Lease, Record};
use weft_subnet::text::{Shown, shown};

use super::Answer;
use super::other_agents::other_agents;
use crate::cli::ReleaseTask;
use crate::kernel::Kernel;
use crate::log::text::printable;
use crate::observe::status::joined;
use crate::options::Store;
use crate::{agent, files, saved};

/// `weft lease ls`.
///
/// # Errors
/// The store cannot be read.
pub async fn list(store: &Store) -> anyhow::Result<Answer> {
    let records = store.open_existing()?.list().await.context("list leases")?;
    Ok(Answer::success(render(&records)))
}

/// `weft lease rm`.
///
/// # Errors
/// There is no such lease, or the store fails.
pub async fn remove(store: &Store, id: &str) -> anyhow::Result<Answer> {
    store.open_existing()?.remove(id).await.with_context(|| format!("remove lease {id}"))?;
    Ok(Answer::success(printable(&format!("removed {id}\n"))))
}

/// `weft release`: gives the lease of this machine back.
///
/// # Errors
/// Its agent runs, there is no lease of this machine, or the store fails.
pub async fn release(task: &ReleaseTask) -> anyhow::Result<Answer> {
    other_agents(&task.socket, &task.subnet_file, "it would take the lease again")?;
    let file = task.subnet_file.display();
    let text = files::read_text(&task.subnet_file)
        .with_context(|| format!("read {file}, which says what our subnet is (else: weft lease rm)"))?;
    let env = SubnetEnv::parse(&text).with_context(|| format!("{file} names no subnet: use weft lease rm"))?;
    let machine = agent::open_kernel(&task.subnet_file)?.machine().context("read the addresses of this machine")?;
    let ours: Vec<IpAddr> =
        machine.addrs.iter().map(|addr| addr.net.addr()).chain(task.public.iter().copied()).collect();
    let source = task.store.open_existing()?;
    let records = source.list().await.context("list leases")?;
    let lease = own(&records, &env.subnets, &ours)?;
    source.release(lease).await.with_context(|| format!("release {}", env.subnets))?;
    // A start without the store must not use this lease again.
    if let Err(error) = saved::remove(&task.state_dir, &task.subnet_file) {
        eprintln!("weft: remove the saved peers: {error}");
    }
    Ok(Answer::success(format!("released {}\n", env.subnets)))
}

/// Returns the lease of this machine: it has the subnet of subnet.env and names one of the addresses `ours`. A Node of
/// Kubernetes may have a pod CIDR of a family that net-conf does not enable, and subnet.env does not name this one.
///
/// # Errors
/// There is no such lease, or it names only addresses of another machine.
fn own<'a>(records: &'a [Record], subnets: &Subnets, ours: &[IpAddr]) -> anyhow::Result<&'a Lease> {
    let leases = || records.iter().filter_map(|record| record.lease.as_ref().ok());
    let has_ours = |lease: &&Lease| subnets.iter().all(|net| lease.subnets.of(family(&net)) == Some(net));
    let candidates = || leases().filter(|lease| lease.subnets == *subnets).chain(leases().filter(has_ours));
    // Another node may claim our subnet.
    let is_ours = |lease: &&Lease| lease.attrs.published().any(|ip| ours.contains(&ip));
    if let Some(lease) = candidates().find(is_ours) {
        return Ok(lease);
    }
    let Some(other) = candidates().next() else {
        anyhow::bail!("no lease of {subnets} is in the store: there is nothing to release");
    };
    anyhow::bail!(
        "the lease of {subnets} belongs to {}, which is no address of this machine: if it is ours anyway, give --public-ip",
        joined(other.attrs.published(), ", ")
    );
}

/// Returns a table with a line for each record. The line of a record that cannot be read says why. Ids, types and reasons
/// come from the store, so they may contain escape sequences, which are shown as text.
fn render(records: &[Record]) -> String {
    let mut out = format!("{:24} {:40} BACKEND\n", "ID", "PUBLIC");
    for record in records {
        let _ = match &record.lease {
            Ok(lease) => {
                let kind = Shown(&lease.attrs.backend_type);
                writeln!(out, "{:24} {:40} {kind}", shown(&record.id), joined(lease.attrs.published(), ","))
            }
            Err(reason) => writeln!(out, "{:24} unreadable: {}", shown(&record.id), Shown(reason.as_str())),
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use weft_subnet::attrs::Attrs;
    use weft_subnet::lease::{Age, Unreadable};

    use super::*;

    fn record() -> Record {
        let subnets = Subnets::from_key("10.5.1.0-24").unwrap();
        let attrs = Attrs { public_ip: Some([10, 0, 0, 1].into()), backend_type: "vxlan".into(), ..Attrs::default() };
        let id: std::sync::Arc<str> = "10.5.1.0-24".into();
        Record { id: id.clone(), lease: Ok(Lease { id, subnets, attrs, age: Age::default() }) }
    }

    #[test]
    fn only_the_own_lease_is_released() {
        let records = [record()];
        let subnets = Subnets::from_key("10.5.1.0-24").unwrap();
        assert!(own(&records, &subnets, &[[10, 0, 0, 1].into()]).is_ok());
        let error = own(&records, &subnets, &[[10, 0, 0, 2].into()]).unwrap_err().to_string();
        assert!(error.contains("belongs to 10.0.0.1") && error.contains("--public-ip"), "{error}");
        let other = Subnets::from_key("10.5.2.0-24").unwrap();
        assert!(
            own(&records, &other, &[[10, 0, 0, 1].into()]).unwrap_err().to_string().contains("no lease of 10.5.2.0/24")
        );
    }

    #[test]
    fn a_lease_is_found_although_it_has_a_family_that_subnet_env_does_not_name() {
        let dual = |id: &str, key: &str| {
            let mut record = record();
            let Ok(lease) = &mut record.lease else { panic!("a lease") };
            (lease.id, lease.subnets) = (id.into(), Subnets::from_key(key).unwrap());
            record
        };
        let ours = &[[10, 0, 0, 1].into()];
        let of = |key: &str| Subnets::from_key(key).unwrap();
        let records = [dual("n2", "10.5.2.0-24&fd00:12:0:2::-64"), dual("n1", "10.5.1.0-24&fd00:12:0:1::-64")];
        assert_eq!(&*own(&records, &of("10.5.1.0-24"), ours).unwrap().id, "n1");
        let six = Subnets { v4: None, v6: Some("fd00:12:0:1::/64".parse().unwrap()) };
        assert_eq!(&*own(&records, &six, ours).unwrap().id, "n1");
        assert!(own(&records, &of("10.5.1.0-24&fd00:12:0:2::-64"), ours).is_err(), "a lease must have both subnets");
        // A lease with exactly these subnets is preferred.
        let records = [dual("n1", "10.5.1.0-24&fd00:12:0:1::-64"), record()];
        assert_eq!(&*own(&records, &of("10.5.1.0-24"), ours).unwrap().id, "10.5.1.0-24");
    }

    #[test]
    fn a_lease_of_another_node_with_our_subnet_does_not_hide_ours() {
        let mut claimed = record();
        let Ok(lease) = &mut claimed.lease else { panic!("a lease") };
        (lease.id, lease.attrs.public_ip) = ("another".into(), Some([10, 0, 0, 9].into()));
        let records = [claimed, record()];
        let subnets = Subnets::from_key("10.5.1.0-24").unwrap();
        assert_eq!(&*own(&records, &subnets, &[[10, 0, 0, 1].into()]).unwrap().id, "10.5.1.0-24");
        let error = own(&records, &subnets, &[[10, 0, 0, 2].into()]).unwrap_err().to_string();
        assert!(error.contains("belongs to 10.0.0.9"), "{error}");
    }

    #[test]
    fn the_list_also_shows_records_that_cannot_be_read() {
        let text = render(&[record(), Record { id: "x".into(), lease: Err(Unreadable::new("not a key")) }]);
        assert!(text.contains("10.5.1.0-24") && text.contains("unreadable: not a key"), "{text}");
    }

    #[test]
    fn escape_sequences_of_the_store_are_shown_as_text() {
        let mut peer = record();
        let hostile = format!("vx\u{1b}[2Jlan\n10.5.2.0-24 {}", "x".repeat(5000));
        if let Ok(lease) = &mut peer.lease {
            lease.attrs.backend_type.clone_from(&hostile);
        }
        let named = Record { id: hostile.clone().into(), lease: Err(Unreadable::new(&hostile)) };
        let text = render(&[peer, named]);
        assert_eq!(text.lines().count(), 3, "each record has one line: {text}");
        assert!(text.lines().all(|line| line.chars().count() < 400 && !line.contains(char::is_control)), "{text}");
        assert!(text.contains(r"vx\u{1b}[2Jlan\n"), "{text}");
    }
}
