// SPDX-License-Identifier: Apache-2.0
//! `weft mesh`: shows which nodes packets reach, from this node or from all of them.

pub mod ask;

use std::process::ExitCode;

use anyhow::Context;

use crate::cli;
use crate::cli::questions::{MeshTask, Output};
use crate::commands::{Answer, pretty};
use crate::observe::mesh::cluster::{self, Cluster, KnownNode};
use crate::observe::mesh::row::Row;
use crate::observe::mesh::{self, Mesh, svg};
use crate::observe::socket;
use crate::observe::status::{Status, joined};

/// Asks the agent, and with `--all` the other nodes, too. The exit code says whether a way is broken.
///
/// # Errors
/// No agent answers; or with `--all`, nothing says on which port the other nodes are to be asked.
pub async fn run(task: &MeshTask) -> anyhow::Result<Answer> {
    let status = socket::ask_status(&task.socket).await?;
    let (text, is_broken) = if task.all {
        let port = task.port.or(status.health_port).context(
            "the agent of this node has no --healthz-port, on which nodes tell each other of their ways: start the agents with this flag, \
             or name the port of the other nodes with --port",
        )?;
        let cluster = as_far_as_known(status, Some(port)).await;
        let text = match task.output {
            Output::Json => pretty(&cluster)?,
            Output::Text => cluster::render(&cluster),
            Output::Svg => svg::render(&cluster),
        };
        (text, cluster.is_broken())
    } else {
        let mesh = Mesh::of(status);
        let text = match task.output {
            Output::Json => pretty(&mesh)?,
            Output::Text | Output::Svg => mesh::render(&mesh),
        };
        (text, mesh.is_broken())
    };
    Ok(Answer { text, code: if is_broken { ExitCode::from(cli::exit::FOUND) } else { ExitCode::SUCCESS } })
}

/// Returns the mesh of this node and its peers. Without a port the peers are not asked, and only the own row is known.
pub async fn as_far_as_known(status: Status, port: Option<u16>) -> Cluster {
    let public = joined(status.public.iter().copied(), ",");
    let peers = KnownNode::peers_of(&status);
    let own = Row::of(status);
    match port {
        Some(port) => ask::cluster(own, peers, public, port).await,
        None => ask::own_row(own, peers, public),
    }
}
