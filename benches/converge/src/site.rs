// SPDX-License-Identifier: Apache-2.0
//! The network of the bench: a namespace with etcd, and a fresh namespace with one uplink for each node that is measured.
//!
//! The names of namespaces exist only in the mount namespace of this process, and all processes end with the thread that started them. So
//! nothing outlives the bench.

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};
use weft::kernel::socket::Netlink;

use crate::peers::{Backend, NODE, NODE6, STORE};
use crate::watch::Watch;

const FABRIC: &str = "fabric";
/// The mount point of the memory disk.
pub const MEMORY: &str = "/mnt";

/// Runs a command to its end, and returns its standard output.
///
/// # Errors
/// It cannot be started, or it fails. The error contains its standard error.
pub fn command(program: &str, words: &[&str]) -> Result<String> {
    let out = Command::new(program).args(words).stdin(Stdio::null()).output();
    let out = out.with_context(|| format!("start {program}"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{program} {}: {}: {}", words.join(" "), out.status, said.trim());
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn ip(namespace: &str, words: &str) -> Result<String> {
    let mut all = vec!["-n", namespace];
    all.extend(words.split_whitespace());
    command("ip", &all)
}

/// Moves the calling thread into a namespace.
fn enter(namespace: &str) -> Result<()> {
    let file = fs::File::open(Path::new("/run/netns").join(namespace)).context("open a namespace")?;
    setns(file.as_fd(), CloneFlags::CLONE_NEWNET).context("enter a namespace")
}

/// Makes the fabric and moves the calling thread into it. etcd and its clients run there.
///
/// # Errors
/// A namespace or link cannot be made, for example without root.
pub fn build() -> Result<()> {
    weft_lab::netns::make_names_private()?;
    // Only the mount namespace of this process has the memory disk, so it goes when the process ends in any way.
    mount(Some("weft-bench"), MEMORY, Some("tmpfs"), MsFlags::empty(), None::<&str>).context("mount a memory disk")?;
    command("ip", &["netns", "add", FABRIC])?;
    for words in [
        "link set lo up".to_owned(),
        "link add br0 type bridge".to_owned(),
        "link set br0 up".to_owned(),
        format!("addr add {STORE}/12 dev br0"),
        "addr add fd16::ffff:254/64 dev br0 nodad".to_owned(),
    ] {
        ip(FABRIC, &words)?;
    }
    enter(FABRIC)
}

/// Makes a namespace of this name with an uplink `eth0` that has this address. It goes with the bench.
///
/// # Errors
/// ip fails.
pub fn add_host(name: &str, address: Ipv4Addr) -> Result<()> {
    command("ip", &["netns", "add", name])?;
    ip(FABRIC, &format!("link add {name} type veth peer name eth0 netns {name}"))?;
    ip(FABRIC, &format!("link set {name} master br0 up"))?;
    for words in [
        "link set lo up".to_owned(),
        format!("addr add {address}/12 dev eth0"),
        "link set eth0 up".to_owned(),
        format!("route add default via {STORE}"),
    ] {
        ip(name, &words)?;
    }
    Ok(())
}

/// Lets time pass, for rows that measure what happens in a given time.
pub fn pause(time: Duration) {
    let (_kept, never) = mpsc::channel::<()>();
    let _ = never.recv_timeout(time);
}

type Job = Box<dyn FnOnce() + Send>;

/// A node: its namespace, a thread in it, and a monitor and a netlink socket of it. The namespace is deleted when the node is dropped.
#[derive(Debug)]
pub struct Node {
    /// The monitor of its kernel.
    pub watch: Watch,
    /// The socket for faults and prepared batches.
    pub netlink: Netlink,
    /// This is the last field, so that it is dropped last, because open sockets keep their namespace alive.
    inside: Inside,
}

/// A namespace and the thread that runs in it.
#[derive(Debug)]
struct Inside {
    name: String,
    jobs: Option<mpsc::Sender<Job>>,
    hand: Option<JoinHandle<()>>,
}

impl Node {
    /// Makes a node. Its name must be new.
    ///
    /// # Errors
    /// A link or an address is refused.
    pub fn new(name: &str, backend: Backend) -> Result<Node> {
        add_host(name, NODE)?;
        ip(name, &format!("addr add {NODE6}/64 dev eth0 nodad"))?;
        ip(name, "-6 route add default via fd16::ffff:254")?;
        let (jobs, todo) = mpsc::channel::<Job>();
        let (namespace, entered) = (name.to_owned(), mpsc::sync_channel(1));
        let hand = std::thread::Builder::new().name("hand".into()).spawn(move || {
            let result = enter(&namespace);
            let stays = result.is_ok();
            // The caller waits for this message.
            let _ = entered.0.send(result);
            if stays {
                todo.into_iter().for_each(|job| job());
            }
        });
        let hand = hand.context("start a thread")?;
        entered.1.recv().context("a thread ended")??;
        let (watch, netlink) = call(&jobs, move || -> Result<(Watch, Netlink)> {
            for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                fs::write(format!("/proc/sys/net/{name}"), "1").with_context(|| format!("write {name}"))?;
            }
            Ok((Watch::open(backend.tables())?, Netlink::open().context("open netlink")?))
        })??;
        Ok(Node { watch, netlink, inside: Inside { name: name.to_owned(), jobs: Some(jobs), hand: Some(hand) } })
    }

    /// Runs a function in the node's namespace, on a thread that lives as long as the node.
    ///
    /// # Errors
    /// The function panicked.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        call(self.inside.jobs.as_ref().context("the node is gone")?, job)
    }

    /// Runs `ip WORDS` in the namespace.
    ///
    /// # Errors
    /// ip fails.
    pub fn ip(&self, words: &str) -> Result<String> {
        ip(&self.inside.name, words)
    }

    /// Takes the node off the fabric, or connects it again. Its own links do not change. All nodes have the same address, and only one of
    /// them may answer for it.
    ///
    /// # Errors
    /// ip fails.
    pub fn on_fabric(&self, on: bool) -> Result<()> {
        let name = &self.inside.name;
        if !on {
            return ip(FABRIC, &format!("link set {name} nomaster")).map(drop);
        }
        ip(FABRIC, &format!("link set {name} master br0"))?;
        // The fabric still has the MAC address of another node for this address.
        ["-4", "-6"].into_iter().try_for_each(|family| ip(FABRIC, &format!("{family} neigh flush dev br0")).map(drop))
    }

    /// Returns the index of a link.
    ///
    /// # Errors
    /// There is no link with this name.
    pub fn index(&self, link: &'static str) -> Result<u32> {
        self.run(move || nix::net::if_::if_nametoindex(link))?.with_context(|| format!("no link {link}"))
    }

    /// Makes the device of a backend as weft would, for the floor.
    ///
    /// # Errors
    /// ip fails.
    pub fn add_devices(&self, backend: Backend) -> Result<()> {
        for device in backend.devices() {
            let local = if device.contains("v6") { NODE6.to_string() } else { NODE.to_string() };
            self.ip(&format!("link add {device} type vxlan id 1 dev eth0 local {local} dstport 8472 nolearning"))?;
            let address = if device.contains("v6") { "-6 addr add fd10:0:f0::/128" } else { "addr add 10.250.0.0/32" };
            self.ip(&format!("{address} dev {device}"))?;
            self.ip(&format!("link set {device} up"))?;
        }
        Ok(())
    }
}

fn call<T: Send + 'static>(jobs: &mpsc::Sender<Job>, job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (answer, answers) = mpsc::sync_channel(1);
    let job: Job = Box::new(move || drop(answer.send(job())));
    jobs.send(job).ok().context("the node's thread has ended")?;
    answers.recv().context("the node's thread has ended")
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(hand) = self.hand.take() {
            let _ = hand.join();
        }
        // The links are deleted with the namespace when the sockets are closed. A failure only leaves a name in our own tmpfs.
        let _ = command("ip", &["netns", "del", &self.name]);
        // The kernel deletes the rest in the background. The next measurement must not share the processors with that.
        let begin = Instant::now();
        while nix::net::if_::if_nametoindex(self.name.as_str()).is_ok() && begin.elapsed() < Duration::from_secs(20) {
            pause(Duration::from_millis(5));
        }
    }
}
