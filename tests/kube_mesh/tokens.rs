// SPDX-License-Identifier: Apache-2.0
//! Credentials: a token that is replaced while agents run, and the files of a service account in a pod.

use std::fs;

use anyhow::Result;
use serde_json::json;
use weft_lab::BackendKind;

use crate::program::write_program;
use crate::relay::ADDRESS;
use crate::site::{Site, on_this_thread};

#[test]
fn a_token_is_replaced_and_the_old_one_revoked() {
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
        // The kubelet replaces the file, too.
        let aside = site.token_file().with_extension("new");
        fs::write(&aside, site.token(&json!({})).await)?;
        fs::rename(aside, site.token_file())?;
        site.cluster.remove(&format!("{secrets}/{name}")).await;
        // A write of the own Node and a new watch both need the new token.
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
        // The files are where a pod has them, in a mount namespace of the agent.
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
    /// Starts agents through a script that mounts this directory where a pod has its service account.
    fn in_pod(&mut self, account: &std::path::Path) -> Result<()> {
        let wrapper = self.cluster.conf.path().join("weft");
        let text = format!(
            "#!/bin/sh\nmount -t tmpfs pod /var/run && mkdir -p /var/run/secrets/kubernetes.io && \
             ln -s {} /var/run/secrets/kubernetes.io/serviceaccount && exec {} \"$@\"\n",
            account.display(),
            crate::exe::weft_exe().display()
        );
        write_program(&wrapper, &text);
        for node in &mut self.lab.nodes {
            node.set_exe(&wrapper);
            node.remove_flag("--kubeconfig-file");
        }
        Ok(())
    }
}
