// SPDX-License-Identifier: Apache-2.0
//! Services that nothing carries.

use std::net::TcpListener;

use weft_doctor::facts;
use weft_doctor::processes::{Process, ProcessList};

use super::memory::Group;
use super::{OtherNamespace, in_namespace, ip, named_process, shell, sources, until};

/// Returns the address of the service that nothing carries, as text, if these are all processes of the host. Other tests run such programs at the same time.
fn unserved(pids: &[u32]) -> Option<String> {
    let process = |pid: &u32| Process { pid: *pid, dir: format!("/proc/{pid}").into() };
    let list = ProcessList::of(pids.iter().map(process).collect());
    facts::unserved::read(&list).map(|unserved| unserved.service.to_string())
}

/// It is a finding from a certain age of the pod on, which has a unit test.
#[test]
fn a_pod_that_uses_services_without_kube_proxy_is_found() {
    in_namespace(|file| {
        ip("link set lo up");
        let variables = [("KUBERNETES_SERVICE_HOST", "192.0.2.77"), ("KUBERNETES_SERVICE_PORT", "443")];
        let pod = OtherNamespace::with_variables(&variables);
        let group = Group::new(&format!("kubepods-weft-services-{}", std::process::id()));
        let mut kubelet = named_process(file, "kubelet");
        let both = [kubelet.id(), pod.pid()];
        assert_eq!(unserved(&both), None, "no process of a pod was told the address");
        group.add(pod.pid());
        let is_found = || unserved(&both).as_deref() == Some("192.0.2.77:443");
        assert!(is_found(), "nothing carries the service");
        assert_eq!(unserved(&both[1..]), None, "no kubelet runs here");
        ip("addr add 192.0.2.77/32 dev lo");
        let listener = TcpListener::bind("192.0.2.77:443").unwrap();
        assert_eq!(unserved(&both), None, "a program that is not known here carries it");
        drop(listener);
        until("the service that does not answer", is_found);

        let mut cilium = named_process(file, "cilium-agent");
        assert_eq!(unserved(&[kubelet.id(), pod.pid(), cilium.id()]), None, "Cilium may carry services");
        shell("nft add table ip kube-proxy");
        assert_eq!(facts::read(&sources(file)).unwrap().rules.unserved, None, "kube-proxy has written its rules");
        for process in [&mut cilium, &mut kubelet] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        drop(pod);
    });
}
