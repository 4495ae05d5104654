// SPDX-License-Identifier: Apache-2.0
//! `make kube-demo`: a cluster of three nodes with weft as deploy/ ships it. It runs until Ctrl-C.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "the demo ends with a message if something fails")]
#![allow(clippy::disallowed_methods, reason = "the environment names binaries; polling needs pauses")]
#![allow(clippy::print_stdout, reason = "the demo prints what its user needs")]
#![allow(dead_code, reason = "the tests use more of these modules")]

#[path = "cluster.rs"]
mod cluster;
#[path = "install.rs"]
mod install;
#[path = "../common/places.rs"]
mod places;

use std::fs::{self, File};
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{SigSet, Signal};

use cluster::Cluster;

fn main() {
    // Block the signals before there are other threads, so that only the wait at the end gets them.
    let mut ends = SigSet::empty();
    ends.add(Signal::SIGINT);
    ends.add(Signal::SIGTERM);
    ends.thread_block().unwrap();
    let begin = Instant::now();
    println!("starting a control plane and three nodes ...");
    let cluster = Cluster::start(install::three_nodes(false));
    install::wait_for_bare_nodes(&cluster);
    println!("kubectl apply -k deploy/kube");
    install::install(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    install::assert_mesh(&cluster, &install::wait_for_pods(&cluster));
    println!("pods reach each other after {:.0} s:\n", begin.elapsed().as_secs_f64());
    println!("{}\n\n{}", cluster.kubectl("get nodes -o wide"), cluster.kubectl("get pods -A -o wide"));
    let kubeconfig = serve(&cluster);
    let kubectl = cluster::binaries().join("kubectl");
    let (kubectl, kubeconfig, pid) = (kubectl.display(), kubeconfig.display(), cluster.pid("n1").unwrap());
    println!(
        "
In another shell:
    export KUBECONFIG={kubeconfig}
    alias kubectl={kubectl}
    kubectl get pods -A -o wide
    kubectl -n kube-flannel rollout restart daemonset kube-flannel-ds
    kubectl -n kube-flannel exec daemonset/kube-flannel-ds -- /weft status
    kubectl -n kube-flannel logs -l app=flannel --tail 20
    kubectl get node n1 -o jsonpath='{{.metadata.annotations}}'
    nsenter --target {pid} --all           # a shell on n1: ip route, bridge fdb show dev flannel.1

Ctrl-C removes everything."
    );
    ends.wait().unwrap();
    println!("removing everything ...");
    drop(cluster);
}

/// Forwards a port of this machine's loopback interface to the API server, and returns a kubeconfig with it.
fn serve(cluster: &Cluster) -> PathBuf {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let netns = File::open(cluster.netns()).unwrap();
    thread::spawn(move || {
        // The listener stays in the namespace where it was created.
        setns(netns, CloneFlags::CLONE_NEWNET).unwrap();
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect("10.77.0.1:6443") else { continue };
            let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || carry(from, to));
            thread::spawn(move || carry(server, client));
        }
    });
    let inside = fs::read_to_string(cluster.kubeconfig()).unwrap();
    let path = cluster.kubeconfig().with_file_name("outside.conf");
    fs::write(&path, inside.replace("10.77.0.1:6443", &format!("127.0.0.1:{port}"))).unwrap();
    path
}

fn carry(mut from: TcpStream, mut to: TcpStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
