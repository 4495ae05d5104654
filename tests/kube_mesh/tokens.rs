// SPDX-License-Identifier: Apache-2.0
//! Credentials: a token that is replaced while agents run, and those that a pod finds in its place.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::Result;
use serde_json::json;
use weft_lab::BackendKind;

use crate::relay::ADDRESS;
use crate::site::{Site, on_this_thread};

#[test]
fn a_token_is_replaced_and_the_old_one_dies() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        let secrets = "/api/v1/namespaces/default/secrets";
        let name = site.cluster.name.clone();
        let secret = site.cluster.post(secrets, &json!({"metadata": {"name": name}})).await;
        let bound = json!({"boundObjectRef": {
            "apiVersion": "v1", "kind": "Secret", "name": name, "uid": secret["metadata"]["uid"],
        }});
        fs::write(site.token_file(), site.token(&bound).await)?;
        site.start_agents()?;
        site.lab.settle().await?;
        // As the kubelet does: a new file in the place of the old one.
        let aside = site.token_file().with_extension("new");
        fs::write(&aside, site.token(&json!({})).await)?;
        fs::rename(aside, site.token_file())?;
        site.cluster.remove(&format!("{secrets}/{name}")).await;
        // What needs a call: the agent's own annotation, and a watch that begins anew.
        let before = site.annotation(1, "public-ip").await;
        site.cluster.annotate(1, "public-ip", &json!(null)).await;
        site.annotated(1, "public-ip", before.as_deref()).await?;
        site.relay.close();
        site.relay.open()?;
        site.create_peer(100).await;
        site.routed(1, 100, "", true).await?;
        site.reach_all().await
    });
}

#[test]
fn credentials_of_a_pod() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        // In the place where a pod has it, in the agent's own mount namespace.
        let dir = site.cluster.conf.path().join("account");
        fs::create_dir(&dir)?;
        fs::copy(site.cluster.server.ca(), dir.join("ca.crt"))?;
        fs::copy(site.token_file(), dir.join("token"))?;
        fs::write(dir.join("namespace"), "default")?;
        site.in_pod(&dir)?;
        let (host, port) = ADDRESS.split_once(':').unwrap();
        for node in &mut site.lab.nodes {
            node.set_env("KUBERNETES_SERVICE_HOST", host);
            node.set_env("KUBERNETES_SERVICE_PORT", port);
        }
        site.start_agents()?;
        site.lab.settle().await?;
        site.reach_all().await
    });
}

impl Site {
    /// Agents find this directory where a pod finds its service account.
    fn in_pod(&mut self, account: &std::path::Path) -> Result<()> {
        let wrapper = self.cluster.conf.path().join("weft");
        let text = format!(
            "#!/bin/sh\nmount -t tmpfs pod /var/run && mkdir -p /var/run/secrets/kubernetes.io && \
             ln -s {} /var/run/secrets/kubernetes.io/serviceaccount && exec {} \"$@\"\n",
            account.display(),
            crate::exe::weft_exe().display()
        );
        fs::write(&wrapper, text)?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
        for node in &mut self.lab.nodes {
            node.set_exe(&wrapper);
            node.remove_flag("--kubeconfig-file");
        }
        Ok(())
    }
}
