// SPDX-License-Identifier: Apache-2.0
//! `weft install-cni`: puts the CNI plugin where the container runtime looks for it. For an init container whose image has no
//! shell; a node whose pods come and go meanwhile never sees half a plugin, nor "text file busy".

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::files;

/// The names under which configurations call the plugin. A copy each: `flannel` may become flannel's own again.
const NAMES: [&str; 2] = ["flannel", "weft-veth"];
const AGENT: &str = "weft";
const MODE: u32 = 0o755;

/// A plugin, and whether it had to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Where it is.
    pub path: PathBuf,
    /// False: it was there already.
    pub written: bool,
}

/// Copies `from` to `dir` under each name, by renames; leaves alone what is equal.
pub fn install(from: &Path, dir: &Path) -> anyhow::Result<Vec<Installed>> {
    let plugin = program(from, "--from")?;
    NAMES.iter().map(|name| one(&plugin, dir.join(name))).collect()
}

/// Copies weft itself there: what cleans up a node must be on it when no pod of weft is any more.
pub fn agent(from: &Path, dir: &Path) -> anyhow::Result<Installed> {
    one(&program(from, "--agent")?, dir.join(AGENT))
}

/// What is no program would stop every pod of the node.
fn program(from: &Path, flag: &str) -> anyhow::Result<Vec<u8>> {
    let program = fs::read(from).with_context(|| format!("read {} ({flag})", from.display()))?;
    anyhow::ensure!(program.starts_with(b"\x7fELF"), "{} is no program for Linux ({flag})", from.display());
    Ok(program)
}

fn one(program: &[u8], path: PathBuf) -> anyhow::Result<Installed> {
    let place = path.display();
    let written = write(program, &path).map_err(|error| {
        let remedy = files::remedy(&error, path.parent().unwrap_or(Path::new("/")));
        anyhow::Error::new(error)
            .context(format!("write {place}: is --bin-dir on a disk with room, mounted read-write?{remedy}"))
    })?;
    Ok(Installed { path, written })
}

fn write(program: &[u8], path: &Path) -> io::Result<bool> {
    let usable = fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o7777 == MODE);
    if usable && fs::read(path)? == program {
        return Ok(false);
    }
    files::replace(path, program, MODE)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::{Command, Stdio};

    use super::*;

    fn written(from: &Path, dir: &Path) -> Vec<bool> {
        install(from, dir).unwrap().into_iter().map(|one| one.written).collect()
    }

    #[test]
    fn both_names_once_whole_and_executable() {
        let home = tempfile::tempdir().unwrap();
        let (from, dir) = (Path::new("/bin/cat"), home.path().join("opt/cni/bin"));
        assert_eq!(written(from, &dir), [true, true]);
        assert_eq!(written(from, &dir), [false, false]);
        for name in NAMES {
            let path = dir.join(name);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, MODE);
            assert_eq!(fs::read(&path).unwrap(), fs::read(from).unwrap());
        }
        fs::set_permissions(dir.join("flannel"), PermissionsExt::from_mode(0o644)).unwrap();
        fs::write(dir.join("weft-veth"), "half").unwrap();
        assert_eq!(written(from, &dir), [true, true], "neither would run");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "nothing temporary stays");
    }

    #[test]
    fn the_agent_too_where_it_is_wanted() {
        let home = tempfile::tempdir().unwrap();
        let one = || agent(Path::new("/bin/cat"), home.path()).unwrap();
        let path = home.path().join("weft");
        assert_eq!(one(), Installed { path: path.clone(), written: true });
        assert_eq!(one(), Installed { path: path.clone(), written: false });
        assert_eq!(fs::read(path).unwrap(), fs::read("/bin/cat").unwrap());
        let refusal = format!("{:#}", agent(&home.path().join("none"), home.path()).unwrap_err());
        assert!(refusal.contains("(--agent): No such file"), "{refusal}");
    }

    #[test]
    fn a_running_plugin_is_replaced_and_runs_on() {
        let home = tempfile::tempdir().unwrap();
        install(Path::new("/bin/cat"), home.path()).unwrap();
        let path = home.path().join("flannel");
        let mut runs = Command::new(&path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        assert_eq!(written(Path::new("/bin/true"), home.path()), [true, true]);
        assert!(Command::new(&path).status().unwrap().success());
        drop(runs.stdin.take());
        assert!(runs.wait().unwrap().success());
    }

    #[test]
    fn a_link_in_its_place_is_replaced_not_followed() {
        let home = tempfile::tempdir().unwrap();
        let elsewhere = home.path().join("elsewhere");
        fs::write(&elsewhere, "mine").unwrap();
        symlink(&elsewhere, home.path().join("flannel")).unwrap();
        assert_eq!(written(Path::new("/bin/cat"), home.path()), [true, true]);
        assert_eq!(fs::read(elsewhere).unwrap(), b"mine");
    }

    #[test]
    fn refusals_name_the_flag() {
        let home = tempfile::tempdir().unwrap();
        let refusal = |from: &Path, dir: &Path| format!("{:#}", install(from, dir).unwrap_err());
        let text = home.path().join("text");
        fs::write(&text, "#!/bin/sh\n").unwrap();
        assert!(refusal(&text, home.path()).contains("no program for Linux (--from)"));
        assert!(refusal(&home.path().join("none"), home.path()).contains("(--from): No such file"));
        assert!(refusal(Path::new("/bin/cat"), &text).contains("is --bin-dir"));
    }
}
