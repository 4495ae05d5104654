// SPDX-License-Identifier: Apache-2.0
//! The machine and the versions with which the bench ran.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::options::Options;
use crate::site::command;

/// Returns the machine, the kernel, and the versions of the programs and of etcd, by name.
///
/// # Errors
/// A binary does not print its version.
pub fn machine(options: &Options) -> Result<Vec<(String, String)>> {
    let mut about = of(&options.weft, options.flanneld.as_deref())?;
    let etcd = first(&command("etcd", &["--version"])?);
    let at = about.iter().position(|(name, _)| name == "date").unwrap_or(about.len());
    about.insert(at, ("etcd".to_owned(), etcd));
    Ok(about)
}

/// Returns the machine, the kernel and the versions for a bench that runs weft's code in its own process.
///
/// # Errors
/// As [`machine`].
pub fn host(flanneld_path: Option<&Path>) -> Result<Vec<(String, String)>> {
    let mut about = computer()?;
    let build = if cfg!(debug_assertions) { "dev profile" } else { "release profile" };
    about.push(("build".to_owned(), build.to_owned()));
    about.push(("etcd".to_owned(), first(&command("etcd", &["--version"])?)));
    about.push(("date".to_owned(), first(&command("date", &["-u", "+%Y-%m-%d"])?)));
    if let Some(path) = flanneld_path {
        about.push(("flanneld".to_owned(), flanneld(path)?));
    }
    Ok(about)
}

fn first(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// Returns the processors, the memory, the kernel and the load.
fn computer() -> Result<Vec<(String, String)>> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
    let field = |name: &str| cpuinfo.lines().find_map(|l| l.strip_prefix(name)?.split_once(':').map(|(_, v)| v.trim()));
    let cpu = field("model name").or(field("CPU implementer")).unwrap_or("unknown").to_owned();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kb: Option<f64> = meminfo.lines().next().and_then(|l| l.split_whitespace().nth(1)?.parse().ok());
    let memory = kb.map_or_else(|| "unknown memory".to_owned(), |kb| format!("{:.0} GB", kb / 1024.0 / 1024.0));
    Ok(vec![
        ("machine".to_owned(), format!("{cpus} x {cpu}, {memory}")),
        ("kernel".to_owned(), first(&command("uname", &["-srm"])?)),
        ("load at the start".to_owned(), load()),
    ])
}

/// Returns the machine, the kernel, and the versions of these programs, without that of a store.
///
/// # Errors
/// As [`machine`].
pub fn of(weft: &Path, flanneld_path: Option<&Path>) -> Result<Vec<(String, String)>> {
    let weft = weft.to_string_lossy();
    let mut about = computer()?;
    about.extend([
        ("weft".to_owned(), first(&command(&weft, &["version"])?)),
        ("binary".to_owned(), format!("{:.1} MB, {}", size_mb(Path::new(&*weft))?, built(&weft)?)),
        ("date".to_owned(), first(&command("date", &["-u", "+%Y-%m-%d"])?)),
    ]);
    if let Some(path) = flanneld_path {
        about.push(("flanneld".to_owned(), flanneld(path)?));
    }
    Ok(about)
}

/// Returns the load before the run began. With a high load the results are doubtful.
pub fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(2).collect::<Vec<_>>().join(", ")
}

/// Returns the version of flanneld, which prints it to standard error.
fn flanneld(path: &Path) -> Result<String> {
    let out = std::process::Command::new(path).arg("--version").output();
    let out = out.with_context(|| format!("start {}", path.display()))?;
    let text = [out.stdout, out.stderr].concat();
    Ok(first(&String::from_utf8_lossy(&text)))
}

/// Returns the size of the binary in MB if it was built without Kubernetes, and 0 otherwise, because the bound holds only without it.
///
/// # Errors
/// There is no such file.
pub fn bare_mb(weft: &Path) -> Result<f64> {
    if built(&weft.to_string_lossy())? == WITHOUT { size_mb(weft) } else { Ok(0.0) }
}

const WITHOUT: &str = "without Kubernetes";

fn built(weft: &str) -> Result<&'static str> {
    let lacks = command(weft, &["agent", "--help"])?.contains("Kubernetes (not in this build)");
    Ok(if lacks { WITHOUT } else { "with Kubernetes" })
}

/// Returns the size of a file in MB.
fn size_mb(path: &Path) -> Result<f64> {
    let data = fs::metadata(path).with_context(|| format!("look at {}", path.display()))?;
    Ok(data.len() as f64 / 1024.0 / 1024.0)
}
