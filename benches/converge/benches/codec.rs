// SPDX-License-Identifier: Apache-2.0
//! Measures time and allocations of the codecs: for a lease, for messages to the kernel, and for notifications.

// If one of these calls fails, the bench itself is wrong.
#![allow(clippy::expect_used)]

use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher, black_box};
use nix::libc;
use weft::kernel::decode;
use weft::kernel::encode::{self, Exit, NewNexthop};
use weft::kernel::wire::{Writer, messages};
use weft_backends::state::Mac;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

/// Number of messages in one batch.
const BATCH: u32 = 128;
const LEASE: &[u8] = br#"{"PublicIP":"172.16.1.7","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:04:00:00:00:07"}}"#;

fn main() {
    divan::main();
}

/// Parses the value of a lease.
#[divan::bench]
fn lease_read() -> Attrs {
    Attrs::from_wire(black_box(LEASE)).expect("a lease")
}

/// Writes the value of a lease.
#[divan::bench]
fn lease_write(bencher: Bencher<'_, '_>) {
    let attrs = Attrs::from_wire(LEASE).expect("a lease");
    bencher.bench(|| black_box(&attrs).to_wire());
}

/// Parses the key of a lease.
#[divan::bench(args = ["10.1.7.0-24", "10.1.7.0-24&fd10:0:0:7::-64"])]
fn key_read(key: &str) -> Subnets {
    Subnets::from_key(black_box(key)).expect("a key")
}

/// Writes FDB entry, neighbour, nexthop and route of 32 peers into one datagram.
fn write_batch(w: &mut Writer) {
    for peer in 0..BATCH / 4 {
        let [_, _, high, low] = peer.to_be_bytes();
        let via = std::net::Ipv4Addr::new(10, 1, low, 0).into();
        let mac = Mac([2, 4, 0, 0, high, low]);
        encode::fdb(w, 7, mac, Some(std::net::Ipv4Addr::new(172, 16, high, low).into()));
        w.end(peer * 4 + 1);
        encode::neighbour(w, 7, via, Some(mac));
        w.end(peer * 4 + 2);
        encode::new_nexthop(w, &NewNexthop { id: peer + 1, protocol: 90, via, index: 7, onlink: true });
        w.end(peer * 4 + 3);
        let net = ipnet::IpNet::new(via, 24).expect("a net");
        encode::route(w, net, 0, Exit::Nexthop(peer + 1), Some(90));
        w.end(peer * 4 + 4);
    }
}

/// Writes the messages of one datagram into a buffer that is used again.
#[divan::bench]
fn encode_batch(bencher: Bencher<'_, '_>) {
    let mut w = Writer::default();
    bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
        w.clear();
        write_batch(&mut w);
        black_box(w.bytes().len())
    });
}

/// Reads these messages as the monitor reads notifications.
#[divan::bench]
fn decode_batch(bencher: Bencher<'_, '_>) {
    let mut w = Writer::default();
    write_batch(&mut w);
    bencher.counter(ItemsCount::new(BATCH)).bench(|| {
        let mut read = 0;
        for m in messages(black_box(w.bytes())) {
            read += match m.kind {
                libc::RTM_NEWROUTE => usize::from(decode::route(m.payload).is_some()),
                libc::RTM_NEWNEIGH => usize::from(decode::neighbour(m.payload).is_some()),
                _ => usize::from(decode::nexthop(m.payload).id > 0),
            };
        }
        read
    });
}
