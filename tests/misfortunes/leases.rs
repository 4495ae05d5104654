// SPDX-License-Identifier: Apache-2.0
//! Misfortunes of leases and of the store.

use std::fs;

use anyhow::{Context, Result, ensure};
use weft_lab::Lab;
use weft_lab::store::Store;

use crate::{LabOptions, named, on_this_thread, options};

/// 24: a node of another cluster writes its lease into this store.
#[test]
fn a_node_has_another_network() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        let other = lab.dir().join("other-store");
        fs::create_dir(&other)?;
        fs::write(other.join("config.json"), r#"{"Network":"10.99.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
        lab.nodes[1].set_flag(&format!("--store=dir:{}", other.display()));
        for node in &mut lab.nodes {
            node.start()?;
            node.ready().await?;
        }
        let Store::Dir(store) = &lab.store else { anyhow::bail!("a directory store") };
        let is_lease = |path: &std::path::Path| path.to_string_lossy().contains("10.99.");
        let find = |dir: &std::path::Path| -> Result<std::path::PathBuf> {
            let mut paths = fs::read_dir(dir.join("subnets"))?.filter_map(|entry| Some(entry.ok()?.path()));
            paths.find(|path| is_lease(path)).context("the lease of the other cluster")
        };
        let lease = find(&other)?;
        fs::copy(&lease, store.join("subnets").join(lease.file_name().context("a name")?))?;
        named(&lab.nodes[0], "agent", &["10.99.", "is outside our Network 10.244.0.0/16"]).await
    });
}

/// 25: net-conf has room for two nodes, and there are three.
#[test]
fn there_are_no_subnets_left() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { nodes: 3, ..options() }).await?;
        let conf = r#"{"Network":"10.244.0.0/16","SubnetMin":"10.244.1.0","SubnetMax":"10.244.2.0","Backend":{"Type":"vxlan"}}"#;
        lab.store.set_net_conf(conf).await?;
        for node in &mut lab.nodes[..2] {
            node.start()?;
            node.ready().await?;
        }
        lab.nodes[2].start()?;
        named(&lab.nodes[2], "agent", &["out of subnets"]).await?;
        ensure!(!lab.nodes[2].subnet_file().exists(), "no subnet");
        Ok(())
    });
}
