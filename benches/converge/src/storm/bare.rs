// SPDX-License-Identifier: Apache-2.0
//! The floor: a client that makes only the requests without which no node can have a lease and hear of its peers. It reads net-conf and
//! all leases in one transaction, and chooses at random among all free subnets.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use anyhow::{Context, Result, bail, ensure};
use etcd_client::{
    Client, Compare, CompareOp, EventType, GetOptions, KeyValue, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn,
    TxnOp, TxnOpResponse, WatchOptions,
};
use tokio::sync::mpsc;
use weft_subnet::outside::random;

use super::fleet::{Member, Order, PeerCount, Reached, Shared};
use super::kernel::address;
use super::{FIRST_SUBNET, SUBNETS};
use crate::store::url;

const CONFIG: &str = "/coreos.com/network/config";
const LEASES: &str = "/coreos.com/network/subnets/";
/// The key after the last lease: `0` is the character after `/`.
const LEASES_END: &str = "/coreos.com/network/subnets0";
const TTL: i64 = 86_400;
const MESSAGE_LIMIT: usize = 64 << 20;

/// A bare client of etcd.
pub struct Bare;

/// All leases at one revision.
struct List {
    keys: HashSet<Vec<u8>>,
    /// Our key and its etcd lease.
    own: Option<(Vec<u8>, i64)>,
    revision: i64,
}

impl Member for Bare {
    async fn run(number: usize, shared: Shared, mut orders: mpsc::UnboundedReceiver<Order>) -> Result<()> {
        let mut client = Client::connect([url()], None).await.context("connect to etcd")?;
        let value = value(number)?;
        let mut list = read(&client, &value).await?;
        let (own, etcd_lease) = match list.own.take() {
            Some((key, lease)) => {
                client.lease_keep_alive(lease).await.context("renew a lease")?;
                (key, lease)
            }
            None => create(&mut client, &mut list, &value).await?,
        };
        shared.reached(Reached::Lease);
        let options = WatchOptions::new().with_range(LEASES_END).with_start_revision(list.revision + 1);
        let mut watch = client.watch(CONFIG, Some(options)).await.context("watch the leases")?;
        let mut count = PeerCount::new(&shared);
        let mut peers = list.keys;
        peers.remove(&own);
        count.is(peers.len());
        // A stream that is dropped at once would be cancelled.
        let mut renewals: Option<(LeaseKeeper, LeaseKeepAliveStream)> = None;
        loop {
            tokio::select! {
                message = watch.message() => {
                    let message = message.context("follow the watch")?.context("etcd ended the watch")?;
                    for event in message.events() {
                        let Some(key) = event.kv().map(KeyValue::key).filter(|key| **key != *own) else { continue };
                        match event.event_type() {
                            EventType::Put => drop(peers.insert(key.to_vec())),
                            EventType::Delete => drop(peers.remove(key)),
                        }
                    }
                    count.is(peers.len());
                }
                order = orders.recv() => match order {
                    Some(Order::Renew) => {
                        renewals = Some(client.lease_keep_alive(etcd_lease).await.context("renew a lease")?);
                        shared.reached(Reached::Renewal);
                    }
                    Some(Order::Leave) | None => break,
                },
            }
        }
        drop(renewals);
        let answer = client.delete(own, None).await.context("delete a lease")?;
        ensure!(answer.deleted() == 1, "the lease was gone");
        shared.reached(Reached::End);
        Ok(())
    }
}

/// Returns a value with the length of what weft publishes with the backend vxlan.
fn value(number: usize) -> Result<String> {
    let ip = address(number)?;
    let [a, b, c, d] = ip.octets();
    Ok(format!(
        "{{\"PublicIP\":\"{ip}\",\"PublicIPv6\":null,\"BackendType\":\"vxlan\",\"BackendData\":{{\"VNI\":1,\
         \"VtepMAC\":\"02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}\"}}}}"
    ))
}

/// Reads net-conf and all leases in one transaction.
async fn read(client: &Client, own: &str) -> Result<List> {
    let range = GetOptions::new().with_range(LEASES_END);
    let both = Txn::new().and_then([TxnOp::get(CONFIG, None), TxnOp::get(LEASES, Some(range))]);
    let answer = client.kv_client().max_decoding_message_size(MESSAGE_LIMIT).txn(both).await.context("list leases")?;
    let revision = answer.header().context("an answer without a revision")?.revision();
    let mut list = List { keys: HashSet::new(), own: None, revision };
    for part in answer.op_responses() {
        let TxnOpResponse::Get(part) = part else { bail!("etcd answers something else") };
        for kv in part.kvs().iter().filter(|kv| kv.key() != CONFIG.as_bytes()) {
            if kv.value() == own.as_bytes() {
                list.own = Some((kv.key().to_vec(), kv.lease()));
            }
            list.keys.insert(kv.key().to_vec());
        }
    }
    Ok(list)
}

/// Creates a key for a free subnet. A subnet that another client was faster to take counts as taken from then on.
async fn create(client: &mut Client, list: &mut List, value: &str) -> Result<(Vec<u8>, i64)> {
    let etcd_lease = client.lease_grant(TTL, None).await.context("grant a lease")?.id();
    loop {
        let start = (random() % u64::from(SUBNETS)) as u32;
        let keys = (0..SUBNETS).map(|step| subnet_key((start + step) % SUBNETS).into_bytes());
        let key = keys.into_iter().find(|key| !list.keys.contains(key)).context("out of subnets")?;
        let is_free = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
        let put = TxnOp::put(key.clone(), value, Some(PutOptions::new().with_lease(etcd_lease)));
        let answer = client.txn(Txn::new().when([is_free]).and_then([put])).await.context("create a lease")?;
        if answer.succeeded() {
            return Ok((key, etcd_lease));
        }
        list.keys.insert(key);
    }
}

/// Returns the key of a subnet by its number.
fn subnet_key(number: u32) -> String {
    format!("{LEASES}{}-24", Ipv4Addr::from(FIRST_SUBNET + (number << 8)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_are_those_of_leases() {
        assert_eq!(subnet_key(0), "/coreos.com/network/subnets/10.0.1.0-24");
        assert_eq!(subnet_key(SUBNETS - 1), "/coreos.com/network/subnets/10.255.255.0-24");
        let attrs = weft_subnet::attrs::Attrs::from_wire(value(0).unwrap().as_bytes()).unwrap();
        assert_eq!(attrs.to_wire(), value(0).unwrap(), "weft must write the same bytes");
    }
}
