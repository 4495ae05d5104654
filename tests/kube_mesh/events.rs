// SPDX-License-Identifier: Apache-2.0
//! Events about a Node while it has a lasting fault of its own.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use weft_lab::BackendKind;

use crate::site::{Site, on_this_thread};

/// Gives the agents' account the rights of deploy/kube for Events.
async fn allow_events(site: &Site) {
    let name = format!("weft-events-{}", site.cluster.name);
    let rule = json!({"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]});
    let role = json!({"metadata": {"name": name}, "rules": [rule]});
    let binding = json!({
        "metadata": {"name": name},
        "subjects": [{"kind": "ServiceAccount", "name": site.cluster.name, "namespace": "default"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
    });
    let path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    site.cluster.post(&format!("{path}/roles"), &role).await;
    site.cluster.post(&format!("{path}/rolebindings"), &binding).await;
}

/// Returns the Events about the device of node 1. If the API server is slow, there may be one about that, too.
async fn events(site: &Site) -> Vec<Value> {
    let mut all = site.cluster.events(1).await;
    all.retain(|event| event["reason"].as_str().is_some_and(|reason| reason.starts_with("DeviceFault")));
    all
}

/// Returns whether one of them has this type.
async fn has_event(site: &Site, kind: &str) -> bool {
    events(site).await.iter().any(|event| event["type"] == kind)
}

/// Gives every node a device of another program that has our VNI and port.
async fn take_device(site: &Site) -> Result<()> {
    for node in &site.lab.nodes {
        node.ns.ip("link add theirs type vxlan id 1 dstport 8472 nolearning").await?;
        node.ns.ip("link set theirs up").await?;
    }
    Ok(())
}

async fn give_device_back(site: &mut Site) -> Result<()> {
    for node in &site.lab.nodes {
        node.ns.ip("link del theirs").await?;
    }
    site.lab.settle().await?;
    site.reach_all().await
}

#[test]
fn a_lasting_fault_is_one_event_and_its_end_another() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        allow_events(&site).await;
        site.lab.nodes[0].set_flag("--kube-events-after=1s");
        site.lab.nodes[1].set_flag("--kube-events-after=1s");
        site.lab.nodes[1].set_flag("--kube-events=off");
        site.lab.nodes[2].set_flag("--kube-events-after=1h");
        take_device(&site).await?;
        site.start_agents()?;
        site.until("an Event about the fault", async || has_event(&site, "Warning").await).await?;
        ensure!(!has_event(&site, "Normal").await, "the fault is not over");
        give_device_back(&mut site).await?;
        site.until("an Event about its end", async || has_event(&site, "Normal").await).await?;
        let mut events = events(&site).await;
        events.sort_by_key(|event| event["type"].to_string());
        let [over, fault] = &events[..] else { anyhow::bail!("{events:#?}") };
        ensure!(fault["reason"] == "DeviceFault" && over["reason"] == "DeviceFaultEnded", "{events:#?}");
        for event in [fault, over] {
            ensure!(event["note"].as_str().is_some_and(|note| note.contains("flannel.1")), "{event}");
            ensure!(event["series"].is_null(), "it was written twice: {event}");
        }
        // Node 2 must not write Events, and on node 3 the fault did not last for long enough.
        for node in [2, 3] {
            ensure!(site.cluster.events(node).await.is_empty(), "node {node} has written an Event");
        }
        Ok(())
    });
}

#[test]
fn an_agent_without_the_right_to_write_events_does_all_else() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        for node in &mut site.lab.nodes {
            node.set_flag("--kube-events-after=1s");
        }
        take_device(&site).await?;
        site.start_agents()?;
        let refusal = "create and patch in the namespace default are needed; --kube-events=off turns events off";
        let count = |site: &Site| -> Result<usize> {
            Ok(fs::read_to_string(site.lab.nodes[0].log())?.lines().filter(|line| line.contains(refusal)).count())
        };
        site.until("the refusal to be logged", async || count(&site).is_ok_and(|count| count > 0)).await?;
        give_device_back(&mut site).await?;
        ensure!(count(&site)? == 1, "{}", site.lab.nodes[0].log_tail(20));
        ensure!(site.cluster.events(1).await.is_empty(), "an Event was written");
        Ok(())
    });
}
