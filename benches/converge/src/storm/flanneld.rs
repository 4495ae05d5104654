// SPDX-License-Identifier: Apache-2.0
//! Real flannelds, each in a network namespace of its own with the kernel's own tables. Only requests, bytes and the CPU time of etcd can
//! be compared with agents in one process.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::kernel::address;
use super::{Limit, Times};
use crate::site::{add_host, command, pause};
use crate::store::url;

/// How often the routes are counted.
const EVERY: Duration = Duration::from_millis(200);

/// A node with flanneld. When this is dropped, flanneld is killed and the namespace is deleted.
pub struct Flanneld {
    namespace: String,
    program: PathBuf,
    dir: PathBuf,
    child: Option<Child>,
}

impl Flanneld {
    /// Makes the namespace. flanneld does not run yet.
    ///
    /// # Errors
    /// As `ip`.
    pub fn new(program: &Path, number: usize, dir: &Path) -> Result<Flanneld> {
        let namespace = format!("f{number}");
        add_host(&namespace, address(number)?)?;
        let dir = dir.join(&namespace);
        fs::create_dir_all(&dir).context("create a directory")?;
        Ok(Flanneld { namespace, program: program.to_owned(), dir, child: None })
    }

    /// Starts flanneld.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.dir.join("log")).context("open a log")?;
        let mut start = Command::new("setpriv");
        start.args(["--pdeathsig", "KILL", "ip", "netns", "exec", &self.namespace]).arg(&self.program);
        start.arg("--iface=eth0").arg(format!("--etcd-endpoints={}", url()));
        start.arg(format!("--subnet-file={}", self.dir.join("subnet.env").display()));
        start.stdin(Stdio::null()).stdout(log.try_clone().context("open a log")?).stderr(log);
        self.child = Some(start.spawn().context("start flanneld")?);
        Ok(())
    }

    /// Starts flanneld again if it has ended by itself, as systemd and the kubelet do. Returns whether it had.
    fn start_again(&mut self) -> Result<bool> {
        let Some(child) = &mut self.child else { return Ok(false) };
        let has_ended = child.try_wait().context("look after flanneld")?.is_some();
        if has_ended {
            self.start()?;
        }
        Ok(has_ended)
    }

    /// Kills flanneld.
    ///
    /// # Errors
    /// It cannot be killed.
    pub fn stop(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().context("end flanneld")?;
            child.wait().context("wait for flanneld")?;
        }
        Ok(())
    }

    /// Kills flanneld, and removes what a reboot of the node would.
    ///
    /// # Errors
    /// The device or the subnet file is missing.
    pub fn reboot(&mut self) -> Result<()> {
        self.stop()?;
        command("ip", &["-n", &self.namespace, "link", "del", "flannel.1"])?;
        fs::remove_file(self.dir.join("subnet.env")).context("remove a subnet file")
    }

    /// Returns the key of its lease.
    ///
    /// # Errors
    /// It has none.
    pub fn key(&self) -> Result<String> {
        let text = fs::read_to_string(self.dir.join("subnet.env")).context("read a subnet file")?;
        let subnet = text.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).context("no subnet")?;
        // The file has the first address of the subnet, and the key its network.
        let net: ipnet::Ipv4Net = subnet.parse().context("a subnet")?;
        Ok(format!("/coreos.com/network/subnets/{}-{}", net.network(), net.prefix_len()))
    }

    fn has_lease(&self) -> bool {
        self.dir.join("subnet.env").exists()
    }

    fn peers(&self) -> Result<usize> {
        let routes = command("ip", &["-n", &self.namespace, "-o", "route"])?;
        Ok(routes.lines().filter(|line| line.contains(" via ") && line.contains(" dev flannel.1 ")).count())
    }
}

impl Drop for Flanneld {
    fn drop(&mut self) {
        let _ = self.stop();
        let _ = command("ip", &["netns", "del", &self.namespace]);
    }
}

/// Waits until each has a lease and this many peers. If the limit is reached first, fewer times are returned. One that ends by itself is
/// started again.
///
/// # Errors
/// One cannot be started, or its routes cannot be read.
pub fn wait(all: &mut [Flanneld], peers: usize, limit: Limit) -> Result<Times> {
    let (mut leases, mut complete) = (vec![None; all.len()], vec![None; all.len()]);
    let mut restarts = 0;
    while complete.contains(&None) && limit.begin.elapsed() < limit.most {
        for node in all.iter_mut() {
            restarts += usize::from(node.start_again()?);
        }
        for (node, at) in all.iter().zip(&mut leases).filter(|(_, at)| at.is_none()) {
            *at = node.has_lease().then(|| limit.begin.elapsed());
        }
        for (node, at) in all.iter().zip(&mut complete).filter(|(_, at)| at.is_none()) {
            *at = (node.peers()? == peers).then(|| limit.begin.elapsed());
        }
        pause(EVERY);
    }
    let flat = |times: Vec<Option<Duration>>| times.into_iter().flatten().collect();
    Ok(Times { leases: flat(leases), complete: flat(complete), expected: all.len(), restarts })
}
