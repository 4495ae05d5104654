// SPDX-License-Identifier: Apache-2.0
//! Pods that have been told the address of a service, on a node where neither kube-proxy nor a program in its place runs. The kubelet writes the address of
//! the Kubernetes API into the environment of each container.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use super::other_pods::is_of_kubelet;
use crate::processes::{self, Process, ProcessList, age};

/// The kubelet, in whose network namespace services must be carried.
const KUBELET: &str = "kubelet";
/// Programs that carry services, alone or beside other work, as /proc/PID/comm has them, which is at most 15 bytes.
const CARRIERS: [&str; 14] = [
    "kube-proxy",
    "kpng",
    "hyperkube",
    "kubelite",
    "k3s-server",
    "k3s-agent",
    "k3s",
    "cilium-agent",
    "calico-node",
    "kube-router",
    "antrea-agent",
    "ovnkube",
    "kube-ovn-daemon",
    "loxilb",
];
/// The variables that name the service of the Kubernetes API.
const HOST: &str = "KUBERNETES_SERVICE_HOST=";
const PORT: &str = "KUBERNETES_SERVICE_PORT=";
/// How long an answer of the service is waited for.
const WAIT: Duration = Duration::from_secs(1);

/// A service that nothing seems to carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unserved {
    /// The address of the service, which does not answer.
    pub service: SocketAddr,
    /// How long the oldest pod has run that was told this address.
    pub age: Duration,
}

/// What a process of a pod shows.
#[derive(Debug, Clone, Copy)]
struct Told {
    service: SocketAddr,
    /// The network namespace, which stands for the pod.
    pod: u64,
    age: Duration,
}

/// Looks for pods that have been told the address of a service, where nothing is known to carry services, and asks the service that most of them were told
/// from this node. An answer shows that a program which is not known here carries it. The caller knows that there are no rules of kube-proxy, and that these
/// are all processes of the host.
pub fn read(processes: &ProcessList) -> Option<Unserved> {
    if processes.here(&[KUBELET]).is_empty() || processes.named(&CARRIERS).next().is_some() {
        return None;
    }
    let usual = usual(processes.all().filter_map(told))?;
    TcpStream::connect_timeout(&usual.service, WAIT).is_err().then_some(usual)
}

/// Returns the service that most pods were told. The manifest of a single pod may name another address.
fn usual(told: impl Iterator<Item = Told>) -> Option<Unserved> {
    // Each service with the pods that were told it.
    let mut services: Vec<(Unserved, Vec<u64>)> = Vec::new();
    for Told { service, pod, age } in told {
        match services.iter_mut().find(|(known, _)| known.service == service) {
            Some((known, pods)) => {
                known.age = age.max(known.age);
                if !pods.contains(&pod) {
                    pods.push(pod);
                }
            }
            None => services.push((Unserved { service, age }, vec![pod])),
        }
    }
    services.into_iter().max_by_key(|(one, pods)| (pods.len(), one.age, one.service)).map(|(usual, _)| usual)
}

/// Returns what a process of a pod was told. One in the network of the host does without services: its manifest often names the API server itself.
fn told(process: &Process) -> Option<Told> {
    let file = |name: &str| fs::read(process.dir.join(name)).unwrap_or_default();
    if !is_of_kubelet(&String::from_utf8_lossy(&file("cgroup"))) {
        return None;
    }
    let own = processes::net_namespace(Path::new("/proc/thread-self")).ok()?;
    let pod = processes::net_namespace(&process.dir).ok().filter(|netns| *netns != own)?;
    Some(Told { service: service(&file("environ"))?, pod, age: age(process.pid)? })
}

/// Returns the address that an environment names, as /proc has it.
fn service(environ: &[u8]) -> Option<SocketAddr> {
    let value = |name: &str| {
        let mut variables = environ.split(|byte| *byte == 0);
        variables.find_map(|variable| std::str::from_utf8(variable.strip_prefix(name.as_bytes())?).ok())
    };
    // A name instead of an address is none of a service.
    Some(SocketAddr::new(value(HOST)?.parse::<IpAddr>().ok()?, value(PORT)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_of_a_container_names_the_service_of_the_api() {
        let environ = |host: &str| format!("PATH=/bin\0KUBERNETES_SERVICE_HOST={host}\0KUBERNETES_SERVICE_PORT=443\0");
        let found = |host: &str| service(environ(host).as_bytes()).map(|service| service.to_string());
        assert_eq!(found("10.96.0.1").as_deref(), Some("10.96.0.1:443"));
        assert_eq!(found("fd00::1").as_deref(), Some("[fd00::1]:443"));
        assert_eq!(found("api.example.org"), None);
        assert_eq!(service(b"KUBERNETES_SERVICE_HOST=10.96.0.1\0"), None);
        assert_eq!(service(b"MY_KUBERNETES_SERVICE_HOST=10.96.0.1\0KUBERNETES_SERVICE_PORT=443\0"), None);
        assert_eq!(service(b""), None, "the process has ended");
    }

    #[test]
    fn the_service_that_most_pods_were_told_counts() {
        let told = |service: &str, pod: u64, seconds: u64| Told {
            service: service.parse().unwrap(),
            pod,
            age: Duration::from_secs(seconds),
        };
        let by_hand = ["192.0.2.9:6443"; 3].map(|service| told(service, 1, 900));
        let others = [(2, 300), (3, 500)].map(|(pod, seconds)| told("10.96.0.1:443", pod, seconds));
        let found = usual(by_hand.into_iter().chain(others));
        let wanted = Unserved { service: "10.96.0.1:443".parse().unwrap(), age: Duration::from_secs(500) };
        assert_eq!(found, Some(wanted), "one pod has three processes");
        assert_eq!(usual(std::iter::empty()), None);
    }

    #[test]
    fn names_of_programs_fit_into_proc() {
        assert!(CARRIERS.iter().all(|name| name.len() <= 15));
    }
}
