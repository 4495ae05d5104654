// SPDX-License-Identifier: Apache-2.0
//! The API server answers and refuses. The agent reports the server's message and a remedy, and does not behave as if the server were away.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use weft_lab::BackendKind;

use crate::away::file;
use crate::site::{BINDINGS, Site, binding, on_this_thread};

const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
const POLICY_BINDINGS: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";

#[test]
fn a_policy_that_forbids_our_annotations() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        forbid_annotations(&site).await?;
        site.lab.nodes[0].set_flag("--unwell-after=1s");
        site.lab.nodes[0].start()?;
        site.problem(1, "waiting: the store refuses: lease: patch node", true).await?;
        site.conditioned(1, "True", "WeftIsDown").await?;
        let [_, _, message] = site.condition(1).await.context("no condition")?;
        ensure!(message.contains("not these (an admission policy of the cluster"), "{message}");
        site.cluster.remove(&format!("{POLICY_BINDINGS}/{}", site.cluster.name)).await;
        site.cluster.remove(&format!("{POLICIES}/{}", site.cluster.name)).await;
        site.conditioned(1, "False", "FlannelIsUp").await?;
        let log = fs::read_to_string(site.lab.nodes[0].log())?;
        ensure!(!log.contains("is away"), "{log}");
        Ok(())
    });
}

/// Forbids everybody to add annotations with the prefix of this site. Returns when the server enforces that.
async fn forbid_annotations(site: &Site) -> Result<()> {
    let (name, prefix) = (&site.cluster.name, site.cluster.annotation(""));
    let had = "has(oldObject.metadata.annotations) && key in oldObject.metadata.annotations";
    let expression = format!(
        "!has(object.metadata.annotations) || object.metadata.annotations.all(key, !key.startsWith('{prefix}') || ({had}))"
    );
    let rule =
        json!({"apiGroups": [""], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["nodes", "nodes/*"]});
    let policy = json!({"metadata": {"name": name}, "spec": {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": expression, "message": "not these"}],
    }});
    site.cluster.post(POLICIES, &policy).await;
    let binding = json!({"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}});
    site.cluster.post(POLICY_BINDINGS, &binding).await;
    for try_number in 0..600 {
        let probe = json!({"metadata": {"annotations": {site.cluster.annotation(&format!("probe-{try_number}")): ""}}});
        if site.cluster.try_patch(3, &probe).await.is_err() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("the server does not enforce the policy")
}

#[test]
fn missing_rights_are_reported() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::Vxlan, false).await?;
        let name = format!("weft-{}", site.cluster.name);
        // The agent has saved peers, and must not use them: it is not the API server that needs a repair.
        site.until("peers to be saved", async || file(&site.lab.nodes[0]).is_some()).await?;
        site.lab.nodes[0].stop(Signal::SIGTERM).await?;
        site.cluster.remove(&format!("{BINDINGS}/{name}")).await;
        let review = json!({"spec": {
            "user": format!("system:serviceaccount:default:{}", site.cluster.name),
            "resourceAttributes": {"verb": "watch", "resource": "nodes"},
        }});
        let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let forbidden = async || site.cluster.post(reviews, &review).await["status"]["allowed"] == false;
        site.until("the server to refuse the watch", forbidden).await?;
        site.lab.nodes[0].start()?;
        site.problem(1, "(RBAC: nodes get, list, watch and nodes/status patch are needed", true).await?;
        site.problem(1, "waiting: the store refuses: node ", true).await?;
        // The entries of the earlier run are still in the kernel.
        site.reach_all().await?;
        site.cluster.post(BINDINGS, &binding(&site.cluster)).await;
        site.lab.nodes[0].ready().await?;
        site.problem(1, "RBAC", false).await?;
        let log = fs::read_to_string(site.lab.nodes[0].log())?;
        ensure!(!log.contains("the store is away"), "{log}");
        site.reach_all().await
    });
}
